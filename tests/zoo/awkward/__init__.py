"""Plain torch models, each awkward in one way: how parameters are used, owned, shared, shaped or recomputed.

All read `tokens` (rows × length), or `images` and `labels`, and return their loss; H is the hidden width.
`tests/zoo/models.py` lists them with their data. To add one, subclass `Embedded` and write its `body`.
"""
