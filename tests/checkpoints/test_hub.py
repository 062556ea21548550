import sys
import types

import pytest

from checkpoints import hub


def test_existing_paths_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()
    assert hub.resolve("smollm2-135m").is_dir()
    assert hub.resolve("org/name").is_dir()


@pytest.mark.parametrize(
    "model",
    [
        "",
        "smollm",
        "./none",
        "/none/at-all",
        "~/none",
        "models/none.gguf",
        "a/b/c",
        "org/name:x.bin",
        "a b/c",
    ],
)
def test_anything_else_lists_what_can_be_given(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"wanted an existing GGUF file .* \(smollm2-135m\), or a hub id 'org/name'"):
        hub.resolve(model)


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"'org/name' need huggingface_hub: pip install \"jaxinfer\[hub\]\""):
        hub.resolve("org/name")


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """A huggingface_hub that gives an empty snapshot and records its calls."""
    module = types.ModuleType("huggingface_hub")
    errors = types.ModuleType("huggingface_hub.errors")
    for name in ("HfHubHTTPError", "HFValidationError", "LocalEntryNotFoundError"):
        setattr(errors, name, type(name, (Exception,), {}))
    module.calls = []
    module.errors = errors

    def snapshot_download(repo, allow_patterns):
        module.calls.append((repo, allow_patterns))
        return str(tmp_path)

    def hf_hub_download(repo, file):
        module.calls.append((repo, file))
        return str(tmp_path / file)

    module.snapshot_download, module.hf_hub_download = snapshot_download, hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return module


def test_hub_ids(fake_hub, tmp_path):
    with pytest.raises(ValueError, match="no safetensors in this repository; name a GGUF file of it"):
        hub.resolve("org/name-1.5")
    (tmp_path / "model.safetensors").touch()
    assert hub.resolve("org/name-1.5") == tmp_path
    assert hub.resolve("org/name-1.5:sub/x.Q4_K_M.gguf") == tmp_path / "sub/x.Q4_K_M.gguf"
    assert [call[0] for call in fake_hub.calls] == ["org/name-1.5"] * 3
    assert "*.safetensors" in fake_hub.calls[0][1]
    assert not any("gguf" in pattern or "bin" in pattern for pattern in fake_hub.calls[0][1])
    assert fake_hub.calls[2][1] == "sub/x.Q4_K_M.gguf"


def test_hub_failures(fake_hub):
    def fail(*_, **__):
        raise fake_hub.errors.LocalEntryNotFoundError("cannot reach the hub")

    fake_hub.snapshot_download = fail
    with pytest.raises(hub.PullError, match="org/name: the hub did not give it: cannot reach the hub; check"):
        hub.resolve("org/name")


def test_unknown_name_to_pull_and_list(tmp_path):
    with pytest.raises(ValueError, match="unknown model 'gpt5'; known are smollm2-135m"):
        hub.pull("gpt5")
    ((name, (model, path)),) = hub.list_models(tmp_path).items()
    assert (name, model.licence, path) == ("smollm2-135m", "Apache-2.0", None)
