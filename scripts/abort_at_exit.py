"""Shows that a rank of torch may abort as it ends, without attemper: python scripts/abort_at_exit.py

With torch 2.13 and Python 3.11 it prints "terminate called without an active exception" and ends by SIGABRT (134 in a
shell). A thread of gloo drops the last tensor of a collective that nobody waited for, and needs Python's lock for it.
If the interpreter ends meanwhile, Python 3.11 ends the thread inside a C++ function that may not be unwound. Seen with
gdb: ``~AsyncAllreduceWork``, ``decref_pyobject``, ``PyEval_AcquireThread``, ``pthread_exit``, ``std::terminate``.
See https://github.com/pytorch/pytorch/issues/190489. ``destroy_process_group()`` before the end avoids it.
"""

import sys
import tempfile

import torch
import torch.distributed as dist

sys.setswitchinterval(5)  # as on a busy machine: nobody takes the lock from this thread while the interpreter ends
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
dist.all_reduce(torch.ones(10), async_op=True)
