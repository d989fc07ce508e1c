"""`pd-up --config FILE`: P, D and the proxy on this machine until Ctrl-C.

Owns: the command line and exit codes: 0 stopped by a signal, 2 the config is wrong, 1 anything else.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from common.clock import Clock, SystemClock
from common.errors import ConfigError, StartupError
from common.tasks import only_cause, wait_for_signal
from proxy.up.plan import ChildPlan, plan_children
from proxy.up.trio import ChildDied, running_trio


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pd-up", description="P, D and the proxy on one machine.")
    parser.add_argument("--config", required=True, help="YAML file with the sections engine, prefill, decode, proxy")
    options = parser.parse_args(argv)
    try:
        plans = plan_children(options.config)
        asyncio.run(_until_signal(plans, SystemClock()))
    except ChildDied as death:
        say(f"pd-up: {death}")
        return death.exit_code
    except StartupError as error:
        say(f"pd-up: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # before signals were watched
        return 130
    return 0


def say(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


async def _until_signal(plans: Sequence[ChildPlan], clock: Clock) -> None:
    """Run until a signal; a signal while they start stops them, too."""
    try:
        async with asyncio.TaskGroup() as group:
            # In this order: signals are watched before the first process starts.
            signalled = group.create_task(wait_for_signal())
            serving = group.create_task(_serve(plans, clock))
            say(f"  pd-up | {(await signalled).name}: stopping")
            serving.cancel()
    except BaseExceptionGroup as failures:
        raise only_cause(failures) from failures


async def _serve(plans: Sequence[ChildPlan], clock: Clock) -> None:
    for plan in plans:
        say(f"  pd-up | starting {plan.name} at {plan.url}")
    async with running_trio(plans, say, clock) as trio:
        say(f"  pd-up | ready: {trio.url('proxy')}/v1 (Ctrl-C stops)")
        raise await trio.wait_death()
