"""`gemini checkpoint`: look into checkpoints, verify them, and turn them into other libraries' files and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gemini.checkpoint.manifest import Manifest

checkpoint = typer.Typer(no_args_is_help=True, help="Inspect, verify, export and import checkpoints.")

_SHOWN = 20  # names of files

_Directory = Annotated[Path, typer.Argument(help="A directory of checkpoints, or one of them.")]
_Tag = Annotated[str | None, typer.Option(help="Which one. Default: the newest that is complete.")]
_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@checkpoint.command()
def inspect(directory: _Directory, tag: _Tag = None, as_json: _Json = False) -> None:
    """Show what a checkpoint has: its step, ranks, parameters, optimizer and sizes.

    Example: gemini checkpoint inspect checkpoints
    """
    with _loading_torch():
        from gemini.checkpoint.directory import Directory
        from gemini.checkpoint.manifest import read_manifest

    with _said():
        where = Directory(directory)
        folder = where.find(tag)
        facts = _facts(folder, read_manifest(folder))
        others = [path.name for path, _ in where.complete() if path != folder]
    if as_json:
        typer.echo(json.dumps(facts | {"others": others}, indent=1))
        return
    for name, value in (facts | {"others": ", ".join(others) or "none"}).items():
        typer.echo(f"{name + ':':12} {value}")


@checkpoint.command()
def verify(directory: _Directory, tag: _Tag = None, as_json: _Json = False) -> None:
    """Read every byte and compare it with its checksum. Exit code 2: it is damaged, and how is said.

    Example: gemini checkpoint verify checkpoints --tag step_100
    """
    with _loading_torch():
        from gemini.checkpoint.directory import Directory
        from gemini.checkpoint.manifest import rank_files, read_manifest, verify_files

    with _said():
        folder = Directory(directory).find(tag)
        ranks = rank_files(folder, read_manifest(folder))
        total = sum(summary.num_bytes for each in ranks for summary in each.files.values())
        with _bar("verify", total, shows=not as_json) as told:
            for each in ranks:
                verify_files(folder, each, told)
    facts = {"path": str(folder), "bytes": total, "ok": True}
    _tell(as_json, facts, f"{folder}: {total} bytes, all as they were written")


class _Form(StrEnum):
    """What `export` writes."""

    HUGGINGFACE = "huggingface"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"


@checkpoint.command()
def export(
    directory: _Directory,
    out: Annotated[Path, typer.Argument(help="A folder that is empty or not there.")],
    tag: _Tag = None,
    to: Annotated[
        _Form,
        typer.Option(
            help="huggingface: weights for from_pretrained. With the optimizer, to go on training: fsdp2, a folder of "
            "torch.distributed.checkpoint; deepspeed, a universal checkpoint."
        ),
    ] = _Form.HUGGINGFACE,
    dtype: Annotated[
        str | None, typer.Option(help="Of parameters, for huggingface: own, fp32 (masters as they are), bf16 or fp16.")
    ] = None,
    max_file: Annotated[
        str | None, typer.Option(help="Bytes of a file at most, for huggingface, as in 5GB, the default.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A folder whose config.json and tokenizer are copied, as of the base model, for huggingface."
        ),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving averages of the weights in their place, for huggingface.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write whole weights as safetensors files that from_pretrained loads, or a whole training for another library.

    Example: gemini checkpoint export checkpoints my-model --config base-model --dtype bf16
    """
    with _loading_torch():
        import gemini.checkpoint  # noqa: F401

    with _said():
        if to is not _Form.HUGGINGFACE:
            given = {"--dtype": dtype, "--max-file": max_file, "--config": config, "--ema": ema or None}
            for option, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{option} is for --to huggingface: a training goes on from its masters, by tensors, without a "
                        "config"
                    )
            folder, total = _export_training(directory, out, tag, to, shows=not as_json)
        else:
            folder, total = _export_weights(
                directory, out, tag, dtype or "own", max_file or "5GB", config, ema, shows=not as_json
            )
    names = sorted(each.name for each in folder.iterdir())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    facts = {"path": str(folder), "bytes": total, "files": names}
    _tell(as_json, facts, f"{folder}: {', '.join(names[:_SHOWN])}{more}")


def _export_weights(
    directory: Path,
    out: Path,
    tag: str | None,
    dtype: str,
    max_file: str,
    config: Path | None,
    averages: bool,
    shows: bool,
) -> tuple[Path, int]:
    from gemini.checkpoint.exporting import export_weights, num_bytes
    from gemini.placement.demand import parse_bytes

    total = num_bytes(directory, tag, dtype)
    with _bar("export", total, shows) as told:
        limit = parse_bytes(max_file, "--max-file") or total
        folder = export_weights(
            directory,
            out,
            tag=tag,
            dtype=dtype,
            max_file_bytes=limit,
            config=config,
            averages=averages,
            told=told,
        )
    return folder, total


def _export_training(directory: Path, out: Path, tag: str | None, to: _Form, shows: bool) -> tuple[Path, int]:
    from gemini.checkpoint.outgoing import export_dcp, export_universal

    write = export_dcp if to is _Form.FSDP2 else export_universal
    total = 0
    with _bar("export", None, shows) as bar:

        def told(num_bytes: int) -> None:
            nonlocal total
            total += num_bytes
            bar(num_bytes)

        folder = write(directory, out, tag=tag, told=told)
    return folder, total


@checkpoint.command("import")
def import_(
    foreign: Annotated[
        Path,
        typer.Argument(
            help="A folder of DeepSpeed's, of torch.distributed.checkpoint's (FSDP2) or of Hugging Face's, "
            "a .safetensors file, or a state dict."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="The directory of the new checkpoint.")],
    tag: Annotated[str, typer.Option(help="Its name.")] = "imported",
    as_json: _Json = False,
) -> None:
    """Make a checkpoint of another library's: with masters and optimizer states, or of weights alone.

    Weights alone are loaded with load_checkpoint(..., weights_only=True).
    Example: gemini checkpoint import base-model checkpoints
    """
    with _loading_torch():
        from gemini.checkpoint.foreign import import_checkpoint

    with _said(), _bar("import", None, shows=not as_json) as told:
        folder = import_checkpoint(foreign, directory, tag=tag, told=told)
    _tell(as_json, {"path": str(folder)}, str(folder))


def _loading_torch() -> AbstractContextManager[None]:
    """Inside, modules are imported that need torch: so long is said why nothing else is seen yet."""
    from rich.console import Console

    from gemini.cli.progress import working

    return working(Console(stderr=True), "loading torch")


def _tell(as_json: bool, facts: dict[str, Any], words: str) -> None:
    typer.echo(json.dumps(facts) if as_json else words)


def _facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    numel = sum(math.prod(fact.shape) for fact in manifest.parameters)
    optimizer = manifest.optimizer
    groups = "" if optimizer is None else f"{optimizer.kind}, {len(optimizer.groups)} group(s)"
    return {
        "path": str(folder),
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.world_size,
        "parameters": f"{numel:,} in {len(manifest.parameters)} tensors",
        "dtypes": ", ".join(sorted({fact.dtype for fact in manifest.parameters})),
        "buffers": len(manifest.buffers),
        "optimizer": groups or "none",
        "gradients": "none" if manifest.gradients is None else f"of {manifest.gradients.num_backwards} micro-batches",
        "bytes": sum(each.stat().st_size for each in folder.iterdir() if each.is_file()),
        "version": f"{manifest.version} ({', '.join(f'{k} {v}' for k, v in manifest.versions.items())})",
    }


@contextmanager
def _said() -> Iterator[None]:
    """Errors of the user's or of files, in a sentence and with exit code 2."""
    from gemini.errors import GeminiError

    try:
        yield
    except (GeminiError, OSError, ValueError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _bar(what: str, total: int | None, shows: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, for bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shows) as progress:
        task = progress.add_task(what, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
