"""`bonsai doctor`: versions, this machine, and why each backend does or does not run."""

from __future__ import annotations

import platform
import sys
from typing import Any

import click

from bonsai.cli import options
from bonsai.cli.console import size

__all__ = ["cpu_name", "doctor"]

LIBRARIES = ("numpy", "tokenizers", "jinja2", "click", "rich", "huggingface_hub", "mlx", "torch")
UNAVAILABLE = "unavailable: "


@click.command()
@click.option("--full", is_flag=True, help="Also compute small problems with known answers.")
@options.json_flag
@options.verbosity
def doctor(full: bool, json_: bool) -> None:
    """Show versions, this machine, and which backends work here, or why not.

    With --full each backend that can checks itself on this device; one that finds an error gives
    exit code 1. The output may be pasted into a report: of yours it has paths and nothing else.
    """
    facts = _facts()
    if full:
        facts["checks"] = _checks(facts["backends"])
    _show(facts, json_)
    if any(not check["good"] for found in facts.get("checks", {}).values() for check in found):
        raise click.exceptions.Exit(1)


def _show(facts: dict[str, Any], json_: bool) -> None:
    if json_:
        click.echo(options.as_json(facts))
        return
    libraries = ", ".join(f"{name} {version}" for name, version in facts["libraries"].items())
    click.echo(f"bonsai    {facts['bonsai']}")
    click.echo(f"python    {facts['python']} ({facts['executable']})")
    click.echo(f"system    {facts['system']}, {facts['machine']}")
    click.echo(f"cpu       {facts['cpu']}, {facts['cpus']} usable")
    click.echo(f"libraries {libraries}")
    for name, state in facts["backends"].items():
        click.echo(f"backend   {name}: {state['status'] if state['works'] else state['reason']}")
    store = facts["store"]
    click.echo(f"store     {store['path']}, {size(store['bytes'])} in {store['models']} models")
    for name, found in facts.get("checks", {}).items():
        for check in found:
            mark = "ok" if check["good"] else "WRONG"
            click.echo(f"check     {name}: {check['name']}: {mark}, {check['detail']}")


def _checks(states: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What the backends that work find out about themselves."""
    from bonsai import backends

    found = {}
    for name in (name for name, state in states.items() if state["works"]):
        check = getattr(backends.get(name), "self_check", None)
        if check is not None:
            found[name] = [{"name": c.name, "good": c.good, "detail": c.detail} for c in check()]
    return found


def _facts() -> dict[str, Any]:
    import bonsai
    from bonsai import backends, hub
    from bonsai.backends.cpu import usable_cpus

    store = hub.store()
    states = backends.status()
    return {
        "bonsai": bonsai.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpus": usable_cpus(),
        "libraries": _versions(),
        "backends": {name: _state(text) for name, text in states.items()},
        "store": {
            "path": str(store),
            "bytes": hub.tree_bytes(store),
            "models": len(hub.entries()),
        },
    }


def _state(text: str) -> dict[str, Any]:
    works = not text.startswith(UNAVAILABLE)
    return {"works": works, "status" if works else "reason": text.removeprefix(UNAVAILABLE)}


def _versions() -> dict[str, str]:
    from importlib import metadata  # here, since --help of every verb comes past this file

    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's own name, where it can be read without starting a program."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Hardware"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
