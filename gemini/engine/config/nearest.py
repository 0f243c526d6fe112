"""The valid name that a user most likely meant: by meaning first, by spelling where the words say nothing.

Names of options are a few words of one field, and communities disagree about the words: `gradient_clipping`,
`max_grad_norm` and `clip_grad_norm` are one thing, and no two of them are spelled alike. Words of one meaning stand in
one line of `_SYNONYMS`; the nearest name has the most meanings in common.
"""

import difflib
import re
from collections.abc import Iterable

_SYNONYMS = (
    "clip clipping max_grad_norm grad_norm max_norm gradient_clip_val",
    "grad grads gradient gradients",
    "accumulation accumulate accum acc accumulated",
    "lr learning_rate",
    "memory mem ram vram bytes budget",
    "device gpu cuda accelerator",
    "host cpu",
    "placement offload offloading place residency tensor_placement_policy cpu_offload offload_optimizer offload_param",
    "dtype precision half amp type dtypes fp16 bf16 bfloat16 float16 autocast",
    "stage zero zero_stage level",
    "shard sharding shards partition partitioning",
    "strategy plan",
    "micro per_device per_gpu mini minibatch",
    "batch batches bs",
    "scheduler schedule lr_scheduler lr_schedule",
    "optimizer optim optimiser",
    "timeout seconds",
    "reduce communication comm allreduce reduction",
    "initial init start",
    "interval window every frequency",
    "growth grow increase",
    "backoff decrease",
    "print log logging report verbose",
    "train training",
    "steps step iters iterations",
    "chunk bucket block",
    "size numel elements",
    "max maximum largest limit",
    "min minimum least smallest",
    "scale scaling scaler",
    "monitors monitor tensorboard logger metrics tracker",
    "arguments params kwargs args parameters",
    "wd weight_decay",
    "beta betas momentum",
)
_MEANING = {word: line.split()[0] for line in _SYNONYMS for word in line.split()}
# The longest phrases come first: `max_grad_norm` contains `grad_norm`.
_PHRASES = sorted((word for word in _MEANING if "_" in word), key=len, reverse=True)
_TYPO, _ALIKE = 0.85, 0.6  # ratios of difflib: a slip of the finger; and what may still be meant
_MEANT = 0.3  # the part of all meanings that two names have in common


def meanings(name: str) -> frozenset[str]:
    """What the words of a name mean.

    >>> sorted(meanings("gradient_clipping"))
    ['clip', 'grad']
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[-. ]", "_", name).lower()
    found = set()
    for phrase in _PHRASES:
        # Phrases are found as whole words: `max_norm` is no part of `max_normalized`.
        if re.search(rf"(?<![a-z0-9]){phrase}(?![a-z0-9])", name):
            found.add(_MEANING[phrase])
            # A phrase also has the meanings of its words: `max_grad_norm` is near to names with "grad", too.
            found.update(_MEANING[word] for word in phrase.split("_") if word in _MEANING)
            # What a longer phrase has used is no phrase of its own any more.
            name = name.replace(phrase, "_")
    return frozenset(found | {_MEANING.get(word, word) for word in name.split("_") if word})


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The one of `valid` that is nearest to `name`, or None where none is near.

    Valid names may be dotted paths, of which the last part is compared. Among equals the first in `valid` wins.
    """
    by_last: dict[str, str] = {}
    for path in valid:
        by_last.setdefault(path.rpartition(".")[2], path)
    # A slip of the finger comes first, because its words mean nothing: "stge" is in no line of synonyms.
    slip = difflib.get_close_matches(name, by_last, n=1, cutoff=_TYPO)
    if slip:
        return by_last[slip[0]]
    wanted = meanings(name)

    def in_common(last: str) -> tuple[float, float]:
        theirs = meanings(last)
        # The first number is the part of all their meanings that both names have. Spelling decides among equals.
        return len(wanted & theirs) / len(wanted | theirs), difflib.SequenceMatcher(None, name, last).ratio()

    best = max(by_last, key=in_common, default=None)
    if best is not None and in_common(best)[0] >= _MEANT:
        return by_last[best]
    alike = difflib.get_close_matches(name, by_last, n=1, cutoff=_ALIKE)
    return by_last[alike[0]] if alike else None
