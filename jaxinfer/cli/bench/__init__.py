"""`jaxinfer bench`: speed, start-up and accuracy of a model on this machine."""

import click

from jaxinfer.cli.bench.accuracy import accuracy
from jaxinfer.cli.bench.speed import latency, throughput
from jaxinfer.cli.bench.startup import startup
from jaxinfer.cli.options import debug_option


@click.group()
def bench() -> None:
    """Measure speed, start-up and accuracy, and compare with other engines."""


for command in (latency, throughput, startup, accuracy):
    bench.add_command(debug_option(command))
