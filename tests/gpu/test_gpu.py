"""On a real GPU: the plain loop's bits, budgets by the allocator's own figures, pinned memory, late copies."""

import gc
import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import ShardedModel, ShardedOptimizer
from gemini.placement.demand import Kind
from gemini.runtime.chunk import Chunk
from gemini.runtime.params import PayloadSlots
from optim import HybridAdam, accumulate_sum_of_squares_, zero_norm_limbs
from tests.gpu import loops
from tests.gpu.late import CYCLES, LateCopies
from tests.gpu.loops import GPT2, MLP, SUBJECTS, Outcome, Subject, assert_same_bits, same_bits, train_plain

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PLACES = ["fits", "cuda", "cpu", "half", "smallest"]


@lru_cache
def plain(subject: Subject, device: torch.device, dtype: torch.dtype, steps: int) -> Outcome:
    return train_plain(subject, device, dtype, steps)


# -- same bits


@DTYPES
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_training_gives_the_plain_loops_bits(
    subject: Subject, place: str, dtype: torch.dtype, device: torch.device
) -> None:
    outcome, model = loops.train_sharded(subject, device, dtype, place)
    assert_same_bits(outcome, plain(subject, device, dtype, 4))
    if place != "half":  # what fits on the device, or has a slot for every chunk, is never evicted
        assert (model.observer.counts["evict"] > 0) == (place == "smallest")
    if place in ("cpu", "smallest"):
        assert model.chunk_manager.memory.transfer.bytes_by_link["host->device"] > 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("subject", [MLP, GPT2], ids=str)
def test_a_backward_that_updates_gives_the_plain_loops_bits(subject: Subject, place: str, device: torch.device) -> None:
    outcome, model = loops.train_sharded(subject, device, torch.bfloat16, place + loops.IN_BACKWARD)
    assert_same_bits(outcome, plain(subject, device, torch.bfloat16, 4))
    assert not any(Kind.GRAD in chunk.homes for chunk in model.chunk_manager.chunks)


@DTYPES
@pytest.mark.parametrize("subject", [MLP, GPT2], ids=str)
def test_evicted_memory_that_reads_as_nan_changes_nothing(
    subject: Subject, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    vacate = PayloadSlots.vacate
    num_poisoned = 0

    def poisoning(self: PayloadSlots, chunk: Chunk, successor: Chunk | None = None) -> bool:
        nonlocal num_poisoned
        slot = chunk.slot
        free = vacate(self, chunk, successor)
        if free and slot is not None and slot.region is not None:
            slot.region.flat.fill_(0xFF)
            num_poisoned += 1
        return free

    monkeypatch.setattr(PayloadSlots, "vacate", poisoning)
    outcome, _ = loops.train_sharded(subject, device, dtype, "smallest")
    assert_same_bits(outcome, plain(subject, device, dtype, 4))
    assert num_poisoned > 0


@DTYPES
@pytest.mark.parametrize("place", ["cpu", "half", "smallest", "smallest" + loops.IN_BACKWARD])
@pytest.mark.parametrize("subject", [MLP, GPT2], ids=str)
def test_copies_that_run_late_change_nothing(
    subject: Subject, place: str, dtype: torch.dtype, cuda: torch.device
) -> None:
    steps = 12
    if place.endswith(loops.IN_BACKWARD) and dtype is torch.float32:
        pytest.skip("training in fp32 is clipped here")
    model, optimizer = loops.wrap(subject, cuda, dtype, place)
    outcome = Outcome()
    with LateCopies(CYCLES // (1 if subject is MLP else 8)) as late:
        loops.train_steps(subject, model, optimizer, cuda, dtype, range(steps), outcome)
    assert late.num_late > 0
    assert_same_bits(loops.collect(model, optimizer, outcome), plain(subject, cuda, dtype, steps))


@DTYPES
def test_a_device_that_lags_behind_in_every_layer_changes_nothing(dtype: torch.dtype, cuda: torch.device) -> None:
    steps = 30
    model, optimizer = loops.wrap(MLP, cuda, dtype, "smallest")
    for layer in model.module.layers:
        layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))
        layer.register_full_backward_hook(lambda *_: torch.cuda._sleep(CYCLES))
    outcome = Outcome()
    loops.train_steps(MLP, model, optimizer, cuda, dtype, range(steps), outcome)
    assert_same_bits(loops.collect(model, optimizer, outcome), plain(MLP, cuda, dtype, steps))


@DTYPES
@pytest.mark.parametrize(("first", "second"), [("cuda", "smallest"), ("cpu", "half"), ("smallest", "fits")])
def test_a_state_dict_goes_on_at_another_place_with_the_same_bits(
    first: str, second: str, dtype: torch.dtype, device: torch.device
) -> None:
    model, optimizer = loops.wrap(GPT2, device, dtype, first)
    outcome = Outcome()
    loops.train_steps(GPT2, model, optimizer, device, dtype, range(3), outcome)
    weights, state = model.state_dict(), optimizer.state_dict()
    assert {value.device.type for value in weights.values()} == {"cpu"}
    hashed = gemini.state_hash(model, optimizer)
    model.close()
    model, optimizer = loops.wrap(GPT2, device, dtype, second)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert gemini.state_hash(model, optimizer) == hashed
    loops.train_steps(GPT2, model, optimizer, device, dtype, range(3, 6), outcome)
    assert_same_bits(loops.collect(model, optimizer, outcome), plain(GPT2, device, dtype, 6))


# -- the optimizer's arithmetic


@DTYPES
@pytest.mark.parametrize(
    "settings", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "adamw_mode": False}, {"maximize": True}], ids=str
)
def test_hybrid_adam_on_the_device_has_the_bits_of_the_cpu(
    settings: dict[str, object], dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (257,), (64, 96), (3, 5, 7), (300_000,)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    here = [nn.Parameter(value.clone()) for value in given]
    there = [nn.Parameter(value.to(device)) for value in given]
    ours = HybridAdam(here, lr=3e-3, **settings)  # type: ignore[arg-type]
    theirs = HybridAdam(there, lr=3e-3, **settings)  # type: ignore[arg-type]
    for step in range(5):
        for mine, other in zip(here, there, strict=True):
            scale = 10.0 ** (2 * step - 12)  # down to where squares are subnormal
            grad = (scale * torch.randn(mine.shape, generator=generator)).to(dtype)
            mine.grad, other.grad = grad, grad.to(device)
        ours.step()
        theirs.step()
        for shape, mine, other in zip(shapes, here, there, strict=True):
            assert same_bits(mine, other), f"{shape} after step {step}"
            for name in ours.state[mine]:
                assert same_bits(ours.state[mine][name], theirs.state[other][name]), f"{name} of {shape}, step {step}"


def _awkward(kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    numel = {"short": 3, "ragged": 70_001}.get(kind, 66_000)
    flat = torch.randn(numel, generator=generator)
    if kind == "tiny":
        flat = flat * 1e-30
    if kind == "wide":
        flat = flat * torch.logspace(-37, 37, numel)
    if kind == "infinite":
        flat[[5_000, 60_000]] = math.inf
    if kind == "nan":
        flat[[300, 301, 40_000]] = math.nan
    return flat.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["normal", "short", "ragged", "tiny", "wide", "infinite", "nan"])
def test_the_norms_limbs_are_those_of_the_cpu(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    flat = _awkward(kind, dtype)
    on_cpu, on_device = zero_norm_limbs(), zero_norm_limbs(device)
    first_cpu = accumulate_sum_of_squares_(on_cpu, flat)
    first_device = accumulate_sum_of_squares_(on_device, flat.to(device))
    assert torch.equal(on_cpu, on_device.cpu())
    assert int(first_cpu) == int(first_device)


# -- memory

WIDTH, LAYERS = 512, 12
STEADY_STEPS = 8


def _wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


STATE_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * loops.STATE_BYTES
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4


def _allocated(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    gc.collect()
    return torch.cuda.memory_allocated(device)


def _requested(device: torch.device) -> int:
    """What tensors have asked for. Beside it the allocator rounds up to 512 bytes, and leaves up to 1 MiB of a block
    that is larger than that unsplit.
    """
    torch.cuda.synchronize(device)
    gc.collect()
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def _wrapped(device: torch.device, budget: int) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(_wide().to(device), device=device, model_data_memory=budget, chunk_size=2 * LAYER_BYTES // 4)
    return model, ShardedOptimizer(model, HybridAdam(model.parameters()), clip_grad_norm=1.0)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> int:
    """One step; returns by how much forward and backward raised the allocated bytes at most."""
    before = _allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    model(x).square().mean().backward()
    grew = torch.cuda.max_memory_allocated(x.device) - before
    optimizer.step()
    optimizer.zero_grad()
    return grew


@pytest.mark.parametrize("part", [4, 2, 1])
def test_the_allocators_figures_stay_inside_the_budget(part: int, cuda: torch.device) -> None:
    x = torch.randn(64, WIDTH, device=cuda)
    module = _wide().to(cuda)
    plain_adam = HybridAdam(module.parameters())
    growth = [_step(module, plain_adam, x) for _ in range(3)][-1]  # the first one also takes cuBLAS's workspace
    activation_bytes = growth - STATE_BYTES // 4  # plain backward allocates all gradients besides
    del module, plain_adam

    base = _requested(cuda)
    budget = STATE_BYTES // part + 2**20
    model, optimizer = _wrapped(cuda, budget)
    _step(model, optimizer, x)  # slots take their memory inside the first forward, beside activations
    device_tier = model.chunk_manager.memory.tiers[0]
    taken = _requested(cuda) - base
    assert taken <= budget + 64 * 1024, (
        "beside placeholders and buffers: the module's own memory was kept, or more than the budget was taken"
    )
    assert taken >= device_tier.ledger.total_bytes, "the ledger counts memory that is not there"
    for _ in range(STEADY_STEPS):
        grew = _step(model, optimizer, x)
        assert grew <= activation_bytes + 4 * LAYER_BYTES, "forward and backward took model data beyond the budget"
        assert device_tier.ledger.peak_bytes <= budget
    assert (model.observer.counts["evict"] > 0) == (part == 4) or part == 2


def test_nothing_is_reserved_or_taken_after_warm_up(cuda: torch.device) -> None:
    x = torch.randn(64, WIDTH, device=cuda)
    model, optimizer = _wrapped(cuda, STATE_BYTES // 4 + 2**20)
    for _ in range(3):
        _step(model, optimizer, x)
    reserved = torch.cuda.memory_reserved(cuda)
    takes = [tier.ledger.num_allocations for tier in model.chunk_manager.memory.tiers]
    for _ in range(STEADY_STEPS):
        _step(model, optimizer, x)
    assert torch.cuda.memory_reserved(cuda) == reserved
    assert [tier.ledger.num_allocations for tier in model.chunk_manager.memory.tiers] == takes


def test_what_rests_on_the_host_is_pinned(cuda: torch.device) -> None:
    model, optimizer = loops.wrap(GPT2, cuda, torch.bfloat16, "cpu")
    buffers = {
        f"{kind} of chunk {chunk.index}": home.flat
        for chunk in model.chunk_manager.chunks
        for kind, home in chunk.homes.items()
        if home.tier == "host"
    }
    for index, state in optimizer._chunk_states.by_chunk.items():
        buffers |= {f"{name} of chunk {index}": flat for name, flat in state.flats.items()}
    assert len(buffers) >= 5 * len(model.chunk_manager.chunks)
    unpinned = [name for name, buffer in buffers.items() if buffer.numel() and not buffer.is_pinned()]
    assert not unpinned, f"{len(unpinned)} of {len(buffers)}: {unpinned[:5]}"


def test_a_budget_that_is_too_small_is_refused_and_leaves_the_module_as_it_was(cuda: torch.device) -> None:
    module = _wide().to(cuda)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    base = _allocated(cuda)
    with pytest.raises(gemini.BudgetError, match="model_data_memory"):
        ShardedModel(module, device=cuda, model_data_memory=LAYER_BYTES)
    assert _allocated(cuda) == base
    assert all(same_bits(value, weights[name]) for name, value in module.state_dict().items())
