"""What runs in the next step: requests as the scheduler sees them, queue, budget, preemption (DESIGN §4).

Owns: every state of a request between admission and its end. Synchronous and free of I/O: `plan` and `apply` are driven
by `common.engine.core`. Must never know models, samplers, HTTP or NIXL.
"""
