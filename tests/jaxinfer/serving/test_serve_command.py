"""`jaxinfer serve` from outside: ready line, signals, kill and restart, mistakes."""

import os
import re
import signal
import socket
import subprocess
import sys

import httpx2
import pytest

from jaxinfer.cli import main

TINY = "tests/golden/models/tiny-chat"
SMALL = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "64"]


def start(*arguments):
    command = [sys.executable, "-m", "jaxinfer.cli", "serve", TINY, *SMALL, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"JAXINFER_API_KEY": "k"})


def ready(process):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"tiny-chat is served at (http://\S+)/v1", line):
            assert re.search(r"steps compiled and \d+ found in the cache in [\d.]+ s", "".join(lines))
            return found[1]
    raise AssertionError("".join(lines))


def chat(url):
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": "Bearer k"}, timeout=60)


@pytest.mark.slow
def test_it_serves_survives_a_kill_and_drains():
    first = start("--port", "0")
    url = ready(first)
    assert chat(url).status_code == 200
    port = url.rsplit(":", 1)[1]
    taken = subprocess.run(
        [sys.executable, "-m", "jaxinfer.cli", "serve", TINY, "--port", port], capture_output=True, text=True
    )
    assert taken.returncode == 1
    assert re.fullmatch(rf"error: cannot listen on 127.0.0.1 port {port}: .* in use; choose .*\n", taken.stderr)
    first.kill()
    first.communicate()
    second = start("--port", port)
    assert ready(second) == url
    assert chat(url).status_code == 200
    second.send_signal(signal.SIGTERM)
    _, rest = second.communicate(timeout=60)
    assert second.returncode == 0
    assert '"path": "/v1/chat/completions"' in rest
    assert "SIGTERM: no new requests" in rest
    assert "secret" not in rest


def test_everything_is_loaded_and_compiled_before_the_server_runs(monkeypatch, capfd, tmp_path):
    warm, ran = [], []
    monkeypatch.setattr(
        "jaxinfer.engine.engine.Engine.warmup", lambda engine: warm.append(engine)
    )  # the slow test compiles
    monkeypatch.setattr("jaxinfer.serving.logs.configure_logs", lambda _: None)
    monkeypatch.setattr("jaxinfer.serving.server.Server.run", lambda self, sockets: ran.append(self._frontend))
    tiers = ["--host-cache", "2MiB", "--disk-cache-dir", str(tmp_path), "--disk-cache", "1GB", "--preemption", "swap"]
    with pytest.raises(SystemExit) as stop:
        main(["serve", TINY, *SMALL, "--port", "0", "--served-model-name", "mine", "--policy", "priority", *tiers])
    assert stop.value.code == 0
    assert len(warm) == 1
    assert (ran[0].config.model_name, ran[0].engine_config.policy, ran[0].max_model_len) == ("mine", "priority", 64)
    engine_config = ran[0].engine_config
    assert (engine_config.host_cache_bytes, engine_config.disk_cache_bytes) == (2 << 20, 10**9)
    assert (engine_config.disk_cache_dir, engine_config.preemption) == (str(tmp_path), "swap")
    assert "mine is served at http://127.0.0.1:" in capfd.readouterr().err


def test_mistakes_are_told_at_once_and_in_one_line(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, code, said in (
            (["no/such/model.gguf", "--port", "0"], 2, "no/such/model.gguf"),
            ([TINY, "--port", str(taken.getsockname()[1])], 1, "choose another --port"),
            ([TINY, "--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid"),
            ([TINY, "--max-queue", "-1"], 2, "max_queue must be 0 or more, got -1"),
            ([TINY, "--disk-cache-dir", "here"], 2, "disk_cache_dir needs host_cache_bytes"),
            ([TINY, "--api-key", "kéy"], 2, "api_key must be printable ASCII"),
        ):
            with pytest.raises(SystemExit) as stop:
                main(["serve", *arguments])
            error = capfd.readouterr().err
            assert stop.value.code == code
            assert said in error
            assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["serve", TINY, "--host-cache", "4 apples"])
    assert "must be a number with a unit such as 24GB or 16GiB, got '4 apples'" in capfd.readouterr().err
