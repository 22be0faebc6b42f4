"""Exclude everything imported so far from garbage collection. Only a fork server imports this module, after all others.

Collections of processes that fork from the server then search only their own objects, and copy no page of the server.
"""

import gc

gc.collect()
gc.freeze()
