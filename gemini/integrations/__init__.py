"""Other libraries' training loops over sharded models: one module a library, none imported before it is asked for.

Each subclasses what its library lets users exchange, changes that by public methods where there are such, and is
pinned in the tests, which also list the private names that it uses.
"""
