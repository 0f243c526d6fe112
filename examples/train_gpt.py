"""Trains a small GPT-2 on the source of Python's own standard library, in as little device memory as you allow.

    python examples/train_gpt.py                                      # one rank, a third of its state on the device
    python examples/train_gpt.py --ranks 2 --model-data-memory 10MiB  # starts two ranks and shares the state
    torchrun --nproc-per-node 2 examples/train_gpt.py                 # the same under a launcher
    python examples/train_gpt.py --demo                               # with and without a budget: the same bits

Everything is made on the spot: the corpus is `*.py` of the standard library, the tokenizer a byte-level BPE trained
on it, the model a Hugging Face GPT-2 with random weights. Read `train` first: it is the whole of what gemini asks of
a training loop. What stands around it starts ranks, prepares data and prints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from budget import a_third
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

import gemini
from gemini import ShardedModel
from gemini.placement.demand import format_bytes, parse_bytes

END_OF_FILE = "<|endoffile|>"
# Tests and installed packages are not the library; the other two are tables and prose, not code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
STATE_BYTES_PER_PARAMETER = 16  # fp32: parameter, gradient and Adam's two moments
BETAS = (0.9, 0.95)
USER_ERRORS = (gemini.GeminiError, ValueError, OSError)  # shown as one line; anything else with its traceback

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
console = Console(highlight=False, soft_wrap=True)


class Policy(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of the command line, which say what each is."""

    steps: int
    batch: int
    lr: float
    seed: int
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    corpus_bytes: int
    cache: Path | None
    policy: str
    stage: int
    dtype: str
    device: str | None
    device_memory: int | None
    model_data_memory: int | None
    chunk_size: int | None
    threads: int
    timeout_s: float
    prompt: str
    sample: int
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank has to say after training."""

    rank: int
    losses: list[float]  # mean over ranks, one a step
    tokens_per_s: float  # of all ranks
    state_hash: str
    sample: str
    num_evictions: int
    budget_bytes: int | None
    peak_device_bytes: int
    peak_host_bytes: int
    memory_report: str


class RanksFailedError(RuntimeError):
    """At least one of the processes that this script started did not end well."""


# ---- training


def train(settings: Settings, rank: int = 0, world_size: int = 1) -> Result:
    """One rank's whole run. Collective: every rank calls it with the same settings."""
    torch.set_num_threads(settings.threads)
    device = torch.device("cpu") if settings.device in ("emulated", "cpu") else gemini.current_device()
    if device.type == "cuda":  # the hash at the end is only worth printing if a second run gives the same
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    tokenizer, tokens = shared_corpus(settings, rank, world_size)

    module = build_gpt(settings)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    say_what_comes(settings, rank, world_size, num_parameters)
    config = {
        "stage": settings.stage,
        "tensor_placement_policy": settings.policy,
        "dtype": "bf16" if settings.dtype == Dtype.bf16 else None,
        "chunk_size": settings.chunk_size,
        "device": settings.device,
        "device_memory": settings.device_memory,
        "model_data_memory": settings.model_data_memory,
        "rank_timeout": settings.timeout_s,
        "optimizer": {"type": "HybridAdam", "params": {"lr": settings.lr, "betas": BETAS, "weight_decay": 0.1}},
        "clip_grad_norm": 1.0,
    }
    engine, *_ = gemini.initialize(
        module,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_then_cosine(step, settings.steps)
        ),
        config=config,
        verbose=False,
    )
    model = engine.model

    losses: list[float] = []
    tokens_per_step = settings.batch * settings.context * world_size
    started = warm = time.perf_counter()
    with progress_bar(settings.steps, rank) as show:
        for step in range(settings.steps):
            batch = batch_at(tokens, settings, step, rank, world_size).to(device)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()  # the schedule moves with it

            losses.append(mean_over_ranks(loss, world_size))
            seconds = time.perf_counter() - (warm if step else started)
            speed = tokens_per_step * max(1, step) / seconds
            if step == 0:  # the first step also warms everything up
                warm = time.perf_counter()
            show(step, f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s  {memory_now(model)}")

    text = generate(model, tokenizer, settings, device)
    tiers = memory_tiers(model)
    return Result(
        rank=rank,
        losses=losses,
        tokens_per_s=speed,
        state_hash=gemini.state_hash(model, engine.optimizer),
        sample=text,
        num_evictions=model.observer.counts["evict"],
        budget_bytes=model.plan.budget_bytes,
        peak_device_bytes=tiers["device"].peak_bytes,
        peak_host_bytes=tiers["host"].peak_bytes,
        memory_report=model.memory_report(),
    )


def build_gpt(settings: Settings) -> nn.Module:
    """A GPT-2 with random weights: the same on every rank."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(settings.seed)
    config = transformers.GPT2Config(
        vocab_size=settings.vocabulary,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    # "sdpa" was the faster one on CPU: 0.19 s against 0.21 s for 8 layers of width 128 and 1,024 tokens, one thread
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


def warmup_then_cosine(step: int, num_steps: int) -> float:
    """The learning rate as a fraction of --lr: up over the first tenth, then down to a tenth."""
    num_warmup = max(1, num_steps // 10)
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def batch_at(tokens: Tensor, settings: Settings, step: int, rank: int, world_size: int) -> Tensor:
    """(batch, context) int64: windows of the corpus, others on each rank and at each step."""
    generator = torch.Generator().manual_seed((settings.seed << 32) + step * world_size + rank)
    starts = torch.randint(len(tokens) - settings.context, (settings.batch,), generator=generator)
    return torch.stack([tokens[start : start + settings.context] for start in starts.tolist()]).long()


def mean_over_ranks(loss: Tensor, world_size: int) -> float:
    """Collective."""
    total = loss.detach().float().clone()
    if world_size > 1:
        dist.all_reduce(total)
    return total.item() / world_size


@torch.no_grad()
def generate(model: nn.Module, tokenizer: Any, settings: Settings, device: torch.device) -> str:
    """The prompt, continued. Collective: a forward fetches chunks from other ranks, so all of them sample.

    Every rank has the same weights, logits and generator, hence the same text; the length is fixed.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    ids: list[int] = tokenizer.encode(settings.prompt).ids or [0]
    model.eval()
    for _ in range(settings.sample):
        window = torch.tensor([ids[-settings.context :]], device=device)
        logits = model(input_ids=window).logits[0, -1].float().cpu()
        if settings.temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            chances = torch.softmax(logits / settings.temperature, dim=-1)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train()
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


# ---- corpus and tokenizer


def shared_corpus(settings: Settings, rank: int, world_size: int) -> tuple[Any, Tensor]:
    """(tokenizer, (n,) int16 tokens): made, or read from the cache, by rank 0 and sent to the others. Collective."""
    from tokenizers import Tokenizer

    made: list[Any] = [prepare_corpus(settings) if rank == 0 else None]
    if world_size > 1:
        dist.broadcast_object_list(made, src=0)
    tokenizer_json, tokens = made[0]
    if len(tokens) <= settings.context:
        raise ValueError(
            f"the corpus has {len(tokens)} tokens, which is not more than --context {settings.context}: "
            "raise --corpus-bytes"
        )
    return Tokenizer.from_str(tokenizer_json), torch.from_numpy(tokens)


def prepare_corpus(settings: Settings) -> tuple[str, np.ndarray]:
    """(the tokenizer as JSON, the corpus as int16 tokens). Writes nothing but into --cache."""
    console.print(
        f"corpus: *.py of {sysconfig.get_path('stdlib')} without tests, the first "
        f"{format_bytes(settings.corpus_bytes)} in order of path"
    )
    texts = standard_library_source(settings.corpus_bytes)
    digest = hashlib.sha256("\0".join(texts).encode())
    digest.update(f"vocabulary {settings.vocabulary}".encode())
    saved = settings.cache / f"corpus-{digest.hexdigest()[:16]}.npz" if settings.cache else None
    if saved is not None and saved.exists():
        console.print(f"tokenizer: {len(texts)} files were tokenized before, reading {saved}")
        with np.load(saved) as arrays:
            return str(arrays["tokenizer"]), arrays["tokens"]
    console.print(f"tokenizer: training a byte-level BPE of {settings.vocabulary} tokens on {len(texts)} files")
    started = time.perf_counter()
    tokenizer = train_tokenizer(texts, settings.vocabulary)
    tokens = tokenize(tokenizer, texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    console.print(
        f"tokenizer: {num_bytes:,} bytes are {len(tokens):,} tokens ({num_bytes / len(tokens):.2f} bytes a token), "
        f"in {time.perf_counter() - started:.1f} s"
    )
    if saved is not None:
        saved.parent.mkdir(parents=True, exist_ok=True)
        unfinished = saved.with_name(f"{saved.stem}.{os.getpid()}.npz")
        np.savez(unfinished, tokenizer=tokenizer.to_str(), tokens=tokens)
        unfinished.replace(saved)  # a reader finds the whole file or none
    return tokenizer.to_str(), tokens


def standard_library_source(max_bytes: int) -> list[str]:
    """Texts of the standard library's files in order of path, cut off at `max_bytes` in all."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS and not name.startswith("__")]
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    texts = []
    for path in sorted(paths):
        text = path.read_bytes()[:max_bytes].decode("utf-8", errors="ignore")
        max_bytes -= len(text.encode())
        if text:
            texts.append(text)
        if max_bytes <= 0:
            break
    if not texts:
        raise ValueError(f"{root} has no Python source, or --corpus-bytes is 0")
    return texts


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(tokenizer: Any, texts: list[str]) -> np.ndarray:
    """(n,) int16: all files, each ended by END_OF_FILE."""
    end = tokenizer.token_to_id(END_OF_FILE)
    pieces = [np.array([*encoding.ids, end], dtype=np.int16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate(pieces)


# ---- what is shown


def say_what_comes(settings: Settings, rank: int, world_size: int, num_parameters: int) -> None:
    if rank:
        return
    console.print(
        f"model: GPT-2, {settings.layers} layers of width {settings.width}, {settings.heads} heads, context "
        f"{settings.context}: {num_parameters:,} parameters in {settings.dtype}"
    )
    console.print(
        f"ranks: {world_size}, stage {settings.stage}, {settings.threads} thread{'s' * (settings.threads > 1)} each, "
        f"{settings.batch} × {settings.context} tokens a rank and step, {settings.steps} steps"
    )
    device = settings.device or str(gemini.current_device()).replace("cpu", "emulated")
    budget = "none"
    if settings.model_data_memory is not None:
        budget = f"{format_bytes(settings.model_data_memory)} of model data on each rank's device"
    elif settings.device_memory is not None:
        budget = f"{format_bytes(settings.device_memory)} on each rank's device, activations included"
    console.print(f"budget: {budget}, policy {settings.policy}, {device} device")


def memory_tiers(model: ShardedModel) -> dict[str, Any]:
    """The byte ledgers of this rank's tiers, by name."""
    memory = model.chunk_manager.memory
    return {"device": memory.device.ledger, "host": memory.host.ledger}


def memory_now(model: ShardedModel) -> str:
    return "  ".join(f"{name} {format_bytes(ledger.total_bytes)}" for name, ledger in memory_tiers(model).items())


@contextmanager
def progress_bar(num_steps: int, rank: int) -> Iterator[Callable[[int, str], None]]:
    """`show(step, text)`: a bar on a terminal, about ten lines elsewhere, nothing on other ranks than 0."""
    if rank:
        yield lambda step, text: None
    elif not console.is_terminal:
        shown = {round(tenth * (num_steps - 1) / 10) for tenth in range(11)}

        def line(step: int, text: str) -> None:
            if step in shown:
                console.print(f"step {step + 1:4d} of {num_steps}: {text}")

        yield line
    else:
        columns = (BarColumn(8), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=num_steps)
            yield lambda step, text: bar.update(task, completed=step + 1, description=text)


def show_result(result: Result) -> None:
    """What rank 0 prints at the end of a run."""
    console.print(f"loss: {result.losses[0]:.3f} at first, {result.losses[-1]:.3f} at last")
    console.rule("sample", align="left")
    console.print(result.sample, markup=False)
    console.rule("memory of rank 0", align="left")
    console.print(result.memory_report, markup=False)
    console.rule(align="left")
    console.print(f"state hash: {result.state_hash}")


# ---- ranks


def start_ranks(settings: Settings, num_ranks: int) -> list[Result]:
    """Train on `num_ranks` processes of this machine. Raises RanksFailedError with what each rank said."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve is no reason to fail
    # the store is served from here on a port that the system picks: none is guessed, none can be taken
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=settings.timeout_s), wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="train-gpt-") as folder:
        # ranks are forked from a process that has done nothing but import what they need, once for all of them
        mp.set_forkserver_preload(["gemini", "transformers.models.gpt2.modeling_gpt2"])
        method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        arguments = (num_ranks, settings, store.port, folder)
        ranks = mp.start_processes(run_rank, arguments, num_ranks, join=False, start_method=method)
        try:
            while not ranks.join(timeout=1.0, grace_period=20.0):  # time for the others' last words
                pass
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            said = what_ranks_said(Path(folder))
            killed = str(error) if not said or getattr(error, "signal_name", None) else ""
            raise RanksFailedError("\n".join(filter(None, (killed, said)))) from None
        return [Result(**json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(num_ranks)]


def what_ranks_said(folder: Path) -> str:
    """Every error once, with its ranks; those that only repeat another rank's count if there is no other."""
    ranks_by_text: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.error")) or sorted(folder.glob("*.echo")):
        ranks_by_text.setdefault(path.read_text(), []).append(path.stem)
    return "\n".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items())


def run_rank(rank: int, world_size: int, settings: Settings, port: int, folder: str) -> None:
    """One of the processes of `start_ranks`; leaves its result, or what went wrong, in `folder`."""
    timeout = timedelta(seconds=settings.timeout_s)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout)
    try:
        dist.init_process_group(
            backend_for(settings, rank, world_size), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        result = train(settings, rank, world_size)
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if isinstance(error, USER_ERRORS) else traceback.format_exc()
        kind = "echo" if isinstance(error, (gemini.RemoteRankError, gemini.RankLostError)) else "error"
        Path(folder, f"{rank}.{kind}").write_text(text)
        sys.exit(1)
    Path(folder, f"{rank}.json").write_text(json.dumps(dataclasses.asdict(result)))
    dist.barrier()  # nobody closes connections that another one still reads from
    dist.destroy_process_group()


def run_under_launcher(settings: Settings) -> None:
    """One of torchrun's processes: rank, world size and rendezvous come from the environment."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = backend_for(settings, int(os.environ.get("LOCAL_RANK", rank)), world_size)
    dist.init_process_group(backend, timeout=timedelta(seconds=settings.timeout_s))
    result = train(settings, rank, world_size)
    if rank == 0:
        show_result(result)
    dist.barrier()
    dist.destroy_process_group()


def backend_for(settings: Settings, local_rank: int, world_size: int) -> str:
    """gloo on the emulated device, NCCL on GPUs; chooses this rank's GPU."""
    if settings.device in ("emulated", "cpu") or gemini.current_device().type != "cuda":
        return "gloo"
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus > 1:
        raise ValueError(f"{world_size} ranks need as many GPUs, found {num_gpus}: give --device emulated")
    torch.cuda.set_device(local_rank if num_gpus > 1 else 0)  # SLURM shows every rank its own GPU only
    return "nccl"


# ---- the demo


def demo(settings: Settings, num_ranks: int) -> None:
    """The same training with a budget of a third of its state, and without; fails unless all is as promised."""
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in build_gpt(settings).parameters())
    state_bytes = STATE_BYTES_PER_PARAMETER * num_parameters // num_ranks
    budget_bytes = settings.model_data_memory if settings.model_data_memory is not None else state_bytes // 3
    console.print(
        f"demo: {num_parameters:,} parameters have {format_bytes(STATE_BYTES_PER_PARAMETER * num_parameters)} of "
        f"training state, {format_bytes(state_bytes)} a rank on {num_ranks} ranks. Trained twice: with "
        f"{format_bytes(budget_bytes)} of device memory for it ({budget_bytes / state_bytes:.0%}), and without a "
        "limit: some minutes on a CPU"
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="train-gpt-cache-") as cache:
        settings = dataclasses.replace(settings, cache=settings.cache or Path(cache))
        runs: dict[str, list[Result]] = {}
        for name, budget in (("with the budget", budget_bytes), ("without", None)):
            console.rule(f"[bold]{name}", align="left")
            runs[name] = start_ranks(dataclasses.replace(settings, model_data_memory=budget), num_ranks)
            show_result(runs[name][0])
    console.rule("[bold]both", align="left")
    console.print(comparison(runs, state_bytes))
    console.print(
        "A rank's state is its share of weights, gradients, masters and moments. Without a limit its device holds all "
        "of that and, in slots, the weights of the other ranks that it has gathered: hence more than 100%."
    )
    wrong = broken_promises(runs["with the budget"], runs["without"], budget_bytes)
    for promise in wrong:
        console.print(f"demo failed: {promise}", markup=False, style="red")
    if wrong:
        raise typer.Exit(1)
    losses = runs["without"][0].losses
    console.print(
        f"demo: the same bits with {budget_bytes / state_bytes:.0%} of the training state on the device, "
        f"loss {losses[0]:.2f} → {losses[-1]:.2f}, {time.perf_counter() - started:.0f} s in all",
        style="green",
    )


def comparison(runs: dict[str, list[Result]], state_bytes: int) -> Table:
    """Both runs side by side."""
    table = Table("", *runs, box=None, pad_edge=False)

    def row(name: str, cell: Callable[[list[Result]], str]) -> None:
        table.add_row(name, *(cell(results) for results in runs.values()))

    row("budget a rank", lambda rs: "none" if rs[0].budget_bytes is None else format_bytes(rs[0].budget_bytes))
    row("peak on the device", lambda rs: ", ".join(format_bytes(r.peak_device_bytes) for r in rs))
    row("  of a rank's state", lambda rs: f"{max(r.peak_device_bytes for r in rs) / state_bytes:.0%}")
    row("peak on the host", lambda rs: ", ".join(format_bytes(r.peak_host_bytes) for r in rs))
    row("chunks evicted", lambda rs: ", ".join(f"{r.num_evictions:,}" for r in rs))
    row("tokens/s", lambda rs: f"{rs[0].tokens_per_s:,.0f}")
    row("loss, first and last", lambda rs: f"{rs[0].losses[0]:.6f}, {rs[0].losses[-1]:.6f}")
    row("state hash", lambda rs: f"{rs[0].state_hash[:32]}…")
    return table


def broken_promises(budgeted: list[Result], unlimited: list[Result], budget_bytes: int) -> list[str]:
    """What did not come out as promised, in words; empty if all did."""
    wrong = []
    hashes = {result.state_hash for result in (*budgeted, *unlimited)}
    if len(hashes) > 1:
        wrong.append(f"the state hashes differ: {', '.join(sorted(hashes))}")
    for result, other in zip(budgeted, unlimited, strict=True):
        steps = [n + 1 for n, (a, b) in enumerate(zip(result.losses, other.losses, strict=True)) if a != b]
        if steps:
            wrong.append(f"rank {result.rank}'s losses differ from step {steps[0]} on")
        if result.num_evictions == 0:
            wrong.append(f"rank {result.rank} evicted nothing: the budget of {budget_bytes} bytes was never felt")
        if result.peak_device_bytes > budget_bytes:
            wrong.append(f"rank {result.rank} held {result.peak_device_bytes} bytes, its budget is {budget_bytes}")
    return wrong


# ---- the command line


def a_third_of(settings: Settings, num_ranks: int) -> int:
    """Bytes of a third of what a rank's training takes, where no budget is asked for. Nothing is allocated."""
    with torch.device("meta"):
        module = build_gpt(settings)
    dtype = torch.bfloat16 if settings.dtype == Dtype.bf16 else None
    return a_third(module, num_ranks, stage=settings.stage, dtype=dtype, chunk_size=settings.chunk_size)


def a_size(text: str | None) -> str | None:
    """Checked as soon as it is read; `ShardedModel` itself takes the same strings."""
    try:
        parse_bytes(text, "")
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("=")) from None
    return text


def flag(text: str, panel: str, **options: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **options)


MODEL, TRAINING, MEMORY, OUTPUT = "Model and corpus", "Training", "Ranks and memory", "At the end"


@app.command()
def main(
    demo_: Annotated[
        bool, typer.Option("--demo", help="Train with a third of the memory, then without a limit; compare the bits.")
    ] = False,
    layers: Annotated[int, flag("Transformer blocks.", MODEL, min=1)] = 10,
    width: Annotated[int, flag("Embedding dimension.", MODEL, min=8)] = 128,
    heads: Annotated[int, flag("Attention heads; must divide the width.", MODEL, min=1)] = 4,
    context: Annotated[int, flag("Tokens in a sequence.", MODEL, min=2)] = 128,
    vocabulary: Annotated[int, flag("Tokens that the BPE tokenizer may learn.", MODEL, min=257, max=4096)] = 1024,
    corpus_bytes: Annotated[str, flag("How much source to train on.", MODEL, callback=a_size)] = "2MiB",
    cache: Annotated[
        Path | None, flag("Folder to keep the tokenized corpus in; nothing is kept without it.", MODEL, file_okay=False)
    ] = None,
    steps: Annotated[int, flag("Optimizer steps.", TRAINING, min=1)] = 200,
    batch: Annotated[int, flag("Sequences a rank and step.", TRAINING, min=1)] = 4,
    lr: Annotated[float, flag("Peak learning rate.", TRAINING, min=0.0)] = 1.5e-3,
    seed: Annotated[int, flag("Of weights, batches and the sample.", TRAINING, min=0, max=2**31 - 1)] = 0,
    dtype: Annotated[Dtype, flag("Of the weights; bf16 keeps fp32 masters.", TRAINING)] = Dtype.fp32,
    ranks: Annotated[
        int | None, flag("Processes to start here. Default: 1; 2 with --demo; under torchrun its own.", MEMORY, min=1)
    ] = None,
    stage: Annotated[int, flag("Ranks share: 3 all, 2 all but weights, 1 optimizer state.", MEMORY, min=0, max=3)] = 3,
    policy: Annotated[Policy, flag("Where the state rests between uses.", MEMORY)] = Policy.auto,
    device: Annotated[
        str | None, flag("'emulated' or a torch device. Default: the GPU, emulated without one or with --demo.", MEMORY)
    ] = None,
    device_memory: Annotated[
        str | None, flag("All that a rank may hold on its device, such as 64MiB.", MEMORY, callback=a_size)
    ] = None,
    model_data_memory: Annotated[
        str | None,
        flag("The part of it that training state may take. Default: a third of it.", MEMORY, callback=a_size),
    ] = None,
    chunk_size: Annotated[int | None, flag("Elements of a chunk. Default: searched.", MEMORY, min=1)] = None,
    threads: Annotated[int, flag("Threads of a rank; another number may give other bits.", MEMORY, min=1)] = 1,
    timeout: Annotated[float, flag("Seconds until a rank that does not answer is lost.", MEMORY, min=1.0)] = 300.0,
    prompt: Annotated[str, flag("What the sample begins with.", OUTPUT)] = "import os\n\n\ndef ",
    sample: Annotated[int, flag("Tokens to generate.", OUTPUT, min=0)] = 64,
    temperature: Annotated[float, flag("Of the sample; 0 takes the likeliest token.", OUTPUT, min=0.0)] = 0.7,
) -> None:
    """Train a small GPT-2 on the source of Python's standard library in as little device memory as you allow."""
    if width % heads:
        raise typer.BadParameter(f"--heads {heads} does not divide --width {width}")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and (demo_ or ranks not in (None, int(os.environ["WORLD_SIZE"]))):
        raise typer.BadParameter(
            "torchrun has started the ranks already: leave --ranks and --demo out, or start the script without torchrun"
        )
    if demo_ and device_memory is not None:
        raise typer.BadParameter("--demo compares with a run without a limit: give --model-data-memory instead")
    num_corpus_bytes = parse_bytes(corpus_bytes, "--corpus-bytes")
    assert num_corpus_bytes is not None
    settings = Settings(
        steps=steps,
        batch=batch,
        lr=lr,
        seed=seed,
        layers=layers,
        width=width,
        heads=heads,
        context=context,
        vocabulary=vocabulary,
        corpus_bytes=num_corpus_bytes,
        cache=cache,
        policy=policy.value,
        stage=stage,
        dtype=dtype.value,
        device=device or ("emulated" if demo_ else None),
        device_memory=parse_bytes(device_memory, "--device-memory"),
        model_data_memory=parse_bytes(model_data_memory, "--model-data-memory"),
        chunk_size=chunk_size,
        threads=threads,
        timeout_s=timeout,
        prompt=prompt,
        sample=sample,
        temperature=temperature,
    )
    num_ranks = int(os.environ["WORLD_SIZE"]) if launched else ranks or 1
    if not demo_ and policy is Policy.auto and device_memory is None and model_data_memory is None:
        settings = dataclasses.replace(settings, model_data_memory=a_third_of(settings, num_ranks))
    try:
        if demo_:
            demo(settings, ranks or 2)
        elif launched:
            run_under_launcher(settings)
        elif ranks is None or ranks == 1:
            show_result(train(settings))
        else:
            show_result(start_ranks(settings, ranks)[0])
    except RanksFailedError as error:
        console.print(f"error: {error}", markup=False, style="red")
        raise typer.Exit(1) from None
    except USER_ERRORS as error:
        console.print(f"error: {type(error).__name__}: {error}", markup=False, style="red")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
