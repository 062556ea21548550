"""The files in docs/deploy: what they name exists."""

import json
import re
import shlex
from pathlib import Path

from jaxinfer.cli.serve import serve
from jaxinfer.serving.config import ServerConfig
from jaxinfer.serving.metrics import Metrics

DEPLOY = Path("docs/deploy")


def serve_command(words):
    """The options of `jaxinfer serve` in a command line; click raises on what it does not know."""
    assert words[0] == "serve"
    return serve.make_context("serve", list(words[1:])).params


def test_the_dashboard_asks_for_metrics_that_are_exported():
    text = (DEPLOY / "grafana-dashboard.json").read_text()
    metrics = Metrics(ServerConfig(model_name="m"))
    exported = {sample.name for family in metrics.registry.collect() for sample in family.samples} | {
        f"{family.name}{suffix}" for family in metrics.registry.collect() for suffix in ("_total", "_bucket")
    }
    labels = {"model_name", "le", "finished_reason", "status", "job"}
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        for target in panel["targets"]:
            names = set(re.findall(r"(?:jaxinfer|process)_\w+", target["expr"]))
            assert names, target["expr"]
            assert names <= exported, target["expr"]
            assert set(re.findall(r"(\w+)=~?\"", target["expr"])) <= labels
    shown = set(re.findall(r"jaxinfer_\w+?(?=_bucket|_total|\{|\b)", text))
    kinds = {family.name for family in metrics.registry.collect() if family.name.startswith("jaxinfer_")}
    assert len(kinds - shown) <= 3, sorted(kinds - shown)  # what is measured is to be seen


def test_the_commands_are_those_of_the_command_line():
    dockerfile = Path("Dockerfile").read_text()
    assert serve_command(json.loads(re.search(r"^CMD (.*)$", dockerfile, re.M)[1]))["host"] == "0.0.0.0"
    unit = (DEPLOY / "jaxinfer.service").read_text()
    words = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.M)[1])
    assert serve_command(words[1:])["host"] == "127.0.0.1"
    compose = (DEPLOY / "compose.yaml").read_text()
    assert serve_command(json.loads(re.search(r"command: (.*)$", compose, re.M)[1]))["model"] == "smollm2-135m"
    options = {option.name: option for option in serve.params}
    drain = options["drain_timeout"].default
    assert int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > drain
    assert int(re.search(r"stop_grace_period: (\d+)s", compose)[1]) > drain
    key = options["api_key"].envvar
    assert f"{key}:" in compose
    assert f"{key}=" in unit


def test_the_image_gets_all_packages_and_files_it_installs():
    dockerfile, ignored = Path("Dockerfile").read_text(), Path(".dockerignore").read_text().splitlines()
    copied = {name for line in re.findall(r"^COPY (.*)$", dockerfile, re.M) for name in line.split()[:-1]}
    packages = re.search(r"packages = (\[.*\])", Path("pyproject.toml").read_text())[1]
    assert {*json.loads(packages), "pyproject.toml", "README.md", "LICENSE", "constraints.txt"} == copied
    assert {name.removeprefix("!") for name in ignored if name.startswith("!")} == copied
    assert all(Path(name).exists() for name in copied)
