"""The three batch sizes of a run, of which any two give the third.

train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * number of ranks
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Samples that make an optimizer step, over all ranks; samples of a forward on one rank; forwards a step.

    None: nobody has said how large batches are; the user's loader decides.
    """

    train: int | None
    micro: int | None
    accumulation: int


def batch_sizes(train: int | None, micro: int | None, accumulation: int | None, world_size: int | None) -> BatchSizes:
    """Compute all three from those that were given. Raises ValueError where no whole numbers fit together.

    world_size: the number of ranks. None: not known yet, so that only what is wrong for any number is found.
    """
    is_open = micro is None or accumulation is None or world_size is None
    world_size = world_size or 1
    if train is None:
        steps = accumulation or 1
        return BatchSizes(None if micro is None else micro * steps * world_size, micro, steps)
    given = (micro or 1) * (accumulation or 1) * world_size
    # A factor that is not known yet may be any number, so the known ones need only divide the total.
    if train % given if is_open else train != given:
        factors = [
            f"train_micro_batch_size_per_gpu={micro}" if micro is not None else "",
            f"gradient_accumulation_steps={accumulation}" if accumulation is not None else "",
            f"{world_size} ranks" if world_size > 1 else "",
        ]
        product = " * ".join(filter(None, factors))
        total = f" = {given}" if "*" in product else ""
        verb = "is not a multiple of" if is_open else "is not"
        raise ValueError(f"train_batch_size={train} {verb} {product}{total}: change one of them")
    if accumulation is None:
        # `train_batch_size` alone does not say how a rank divides its samples, so a forward takes all of them.
        accumulation = 1 if micro is None else train // given
    # The division leaves no rest: the check above has made sure that what is known divides the total.
    return BatchSizes(train, micro or train // (accumulation * world_size), accumulation)
