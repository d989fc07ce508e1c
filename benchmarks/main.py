"""`pd-bench NAME …`: one sub-command per benchmark module.

Owns: the table of names. Each module has `add_arguments(parser)` and `run(args) -> int`.
"""

import argparse
import importlib

BENCHMARKS = {
    "ttft": "TTFT taken apart, structured against free, against any OpenAI URL",
    "engine": "TTFT, TPOT and throughput of one engine or a pair",
    "sampler": "the sampling pipeline, beside vLLM's Sampler",
    "grammar": "time to a grammar's first mask and what each backend enforces",
    "itl": "inter-token latency of free streams beside slow masks and hostile constraints",
    "speculation": "time per output token with and without guesses, by kind of text",
    "kv": "KV pulls beside a bare NIXL READ of the same bytes",
    "overhead": "what the proxy adds, with mock engines, beside other proxies",
    "roofline": "bytes and flops of a step against what this machine can do",
    "chaos": "random faults under load; every answer must equal the fault-free one",
}


def main() -> int:
    """Run the named benchmark; its exit status is ours."""
    parser = argparse.ArgumentParser(prog="pd-bench", description=__doc__.split("\n")[0] if __doc__ else None)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, summary in BENCHMARKS.items():
        names.add_parser(name, help=summary, add_help=False)
    chosen, rest = parser.parse_known_args()
    module = importlib.import_module(f"benchmarks.{chosen.name}")
    own = argparse.ArgumentParser(prog=f"pd-bench {chosen.name}", description=BENCHMARKS[chosen.name])
    module.add_arguments(own)
    status: int = module.run(own.parse_args(rest))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
