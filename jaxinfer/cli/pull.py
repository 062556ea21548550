"""`jaxinfer pull`: known models into the cache."""

import click


@click.command()
@click.argument("name", required=False)
@click.option("--list", "show_list", is_flag=True, help="List the known models.")
@click.option("--force", is_flag=True, help="Download again even if it is cached.")
def pull(name: str | None, show_list: bool, force: bool) -> None:
    """Download the known model NAME, check it and keep it in the cache; prints where it is."""
    from checkpoints.hub import list_models
    from checkpoints.hub import pull as pull_model
    from jaxinfer.cli.progress import byte_progress

    if show_list:
        if name is not None or force:
            raise click.UsageError("--list takes neither a NAME nor --force")
        for known, (model, path) in list_models().items():
            click.echo(f"{known:16}{model.size / 1e6:8.0f} MB  {model.licence:12}{path or 'not downloaded'}")
        return
    if name is None:
        raise click.UsageError("give a NAME, or --list to see which there are")
    with byte_progress(f"Downloading {name}") as progress:
        path = pull_model(name, progress=progress, force=force)
    click.echo(path)
