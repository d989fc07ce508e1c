"""Constraints made to hurt: each is refused with a reason or served, in bounded time, and leaves nothing behind."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from common.clock import Deadline, SystemClock
from common.engine.structured_output import probe_server
from common.engine.structured_output.door import MAX_NESTING, MAX_VALUE_BYTES
from common.engine.structured_output.grammar import CompileState
from common.engine.structured_output.probe_wire import ProbeReport, ProbeVerdict
from common.engine.structured_output.service import LocalGrammarService
from common.errors import ConstraintRejected
from common.wire.constraint import Constraint, ConstraintKind
from tests.support.grammars import accepts, make_service, schema, settle, start

EXPLODING_REGEX = "([ab]{1,400}){1,400}"


def overlapping_one_of(depth: int) -> dict[str, object]:
    node: dict[str, object] = {"type": "string"}
    for level in range(depth):
        node = {"oneOf": [{"type": "string", "minLength": level}, {"type": "array", "items": node}, {"minLength": 2}]}
    return node


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (schema('{"a":' * 200 + "1" + "}" * 200), f"the limit is {MAX_NESTING}"),
        (schema("[" * 100_000), f"the limit is {MAX_NESTING}"),
        (schema('{"enum":["' + "x" * 5_000_000 + '"]}'), f"the limit is {MAX_VALUE_BYTES}"),
        (schema('{"pattern":"a\x00b"}'), "NUL"),
        (schema('{"pattern":"a\\u0000b"}'), "NUL"),
        (Constraint(kind=ConstraintKind.REGEX, value="a\x00b"), "NUL"),
        (Constraint(kind=ConstraintKind.REGEX, value="a" * 20_000), "the limit is 16384"),
        (Constraint(kind=ConstraintKind.REGEX, value=""), "empty"),
        (Constraint(kind=ConstraintKind.GRAMMAR, value="  \n"), "empty"),
        (Constraint(kind=ConstraintKind.CHOICE, value="[]"), "non-empty"),
        (Constraint(kind=ConstraintKind.CHOICE, value='["a",""]'), "non-empty"),
        (Constraint(kind=ConstraintKind.CHOICE, value=json.dumps([str(n) for n in range(5000)])), "the limit is 4096"),
        (Constraint(kind=ConstraintKind.STRUCTURAL_TAG, value="[]"), "object"),
        (schema("[1]"), "list"),
        (schema('"text"'), "str"),
        (schema('{"type":'), "not JSON"),
        (Constraint(kind=ConstraintKind.REGEX, value="\ud83d"), "surrogate"),
    ],
)
def test_the_door_refuses_without_compiling(service: LocalGrammarService, constraint: Constraint, reason: str) -> None:
    with pytest.raises(ConstraintRejected, match=reason) as refused:
        service.check(constraint)
    assert refused.value.param == constraint.field
    ticket = settle(service.compile(constraint))
    assert ticket.state is CompileState.FAILED


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint(kind=ConstraintKind.GRAMMAR, value='start: "a"\nstart: "b"'), "duplicate rule"),
        (Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "a"\nroot ::= "b"'), "root"),
        (Constraint(kind=ConstraintKind.GRAMMAR, value="root ::= ("), ""),
        (Constraint(kind=ConstraintKind.GRAMMAR, value="root ::= missing"), "missing"),
        (Constraint(kind=ConstraintKind.REGEX, value="("), "unclosed group"),
        (Constraint(kind=ConstraintKind.REGEX, value="(?=a)b"), "look-around"),
        (Constraint(kind=ConstraintKind.STRUCTURAL_TAG, value='{"type":"structural_tag","format":{"type":"x"}}'), ""),
        (schema('{"$ref":"#"}'), "no output can satisfy"),
        (schema('{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'), "no output"),
        (schema('{"$ref":"#/$defs/nowhere"}'), "nowhere"),
        (schema('{"type":"integer","minimum":3,"maximum":1}'), "greater than"),
        (schema('{"enum":[]}'), ""),
        (schema("false"), ""),
        (schema('{"type":"strin"}'), "strin"),
        (schema('{"type":5}'), ""),
        (schema('{"properties":[1]}'), ""),
        (schema('{"required":"a"}'), ""),
        (schema(json.dumps(overlapping_one_of(18))), "oneOf"),
    ],
)
def test_what_cannot_be_compiled_fails_with_a_reason(
    service: LocalGrammarService, constraint: Constraint, reason: str
) -> None:
    ticket = settle(service.compile(constraint))
    assert ticket.state is CompileState.FAILED
    assert ticket.error is not None
    assert ticket.error.message
    assert reason in ticket.error.message
    assert ticket.error.param == constraint.field


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(kind=ConstraintKind.REGEX, value=EXPLODING_REGEX),
        schema(json.dumps({"type": "string", "pattern": EXPLODING_REGEX})),
        schema('{"type":"string","maxLength":100000}'),
        schema('{"type":"array","minItems":100000,"items":{"type":"integer"}}'),
    ],
)
def test_what_only_looks_dangerous_is_served(service: LocalGrammarService, constraint: Constraint) -> None:
    assert not start(service, constraint).is_terminated()


def test_a_recursive_schema_is_followed_down(service: LocalGrammarService) -> None:
    tree = schema('{"type":"object","properties":{"next":{"$ref":"#"}},"additionalProperties":false}')
    assert accepts(service, tree, '{"next":{"next":{}}}')
    assert not accepts(service, tree, '{"next":{"next":1}}')


def chain(keyword: str, length: int) -> Constraint:
    """Flat in the text; each definition stands for one more level."""
    rest: list[object] = [{"$ref": f"#/$defs/{number + 1}"} for number in range(length)]
    wraps = {"properties": lambda inner: {"x": inner}, "allOf": lambda inner: [inner, {"minLength": 1}]}
    wrap = wraps.get(keyword, lambda inner: [inner, {"type": "null"}])
    definitions = {str(number): {keyword: wrap(inner)} for number, inner in enumerate(rest)}
    definitions[str(length)] = {"type": "string"}
    return schema(json.dumps({"$defs": definitions, "$ref": "#/$defs/0"}))


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "properties"])
def test_a_chain_of_references_that_overruns_the_compilers_stack_is_refused_and_the_process_lives(
    service: LocalGrammarService, keyword: str
) -> None:
    ticket = settle(service.compile(chain(keyword, 2000)))
    assert ticket.error is not None
    assert ticket.error.message
    assert settle(service.compile(chain(keyword, 20))).state is CompileState.READY
    assert settle(service.compile(chain(keyword, 150))).state is CompileState.READY


def slow_grammar(number: int) -> Constraint:
    """Four hundred rules that begin alike: xgrammar works on it for minutes."""
    rules = [f"root ::= {' | '.join(f'a{rule}' for rule in range(400))}"]
    rules += [
        f'a{rule} ::= [a-z]{{1,{rule + 5}}} a{(rule * 7 + 1) % 400} | "{number}q{rule}" a{(rule * 3 + 2) % 400} | ""'
        for rule in range(400)
    ]
    return Constraint(kind=ConstraintKind.GRAMMAR, value="\n".join(rules))


def large_grammar() -> Constraint:
    """Six thousand optional characters in a row: 75 MB in a second."""
    return Constraint(kind=ConstraintKind.GRAMMAR, value="root ::= " + " ".join(["[a-c]?"] * 6000))


@pytest.fixture(scope="module")
def hasty_service() -> Iterator[LocalGrammarService]:
    service = make_service(compile_timeout_s=1.0)
    yield service
    service.close()


def test_eight_slow_compilations_at_once_end_at_the_limit_and_leave_no_process(
    hasty_service: LocalGrammarService,
) -> None:
    tickets = [hasty_service.compile(slow_grammar(number)) for number in range(8)]
    quick = hasty_service.compile(schema('{"type":"boolean"}'))
    assert settle(quick).state is CompileState.READY
    assert all(ticket.state is CompileState.COMPILING for ticket in tickets)
    for ticket in tickets:
        settle(ticket)
        assert ticket.error is not None
        assert "compile_timeout_s = 1" in ticket.error.message
        assert "grammar constraint" in ticket.error.message
    server = psutil.Process(hasty_service.probe_server_pid())
    _, alive = psutil.wait_procs(server.children(), timeout=10)  # killed already; the kernel may still be tidying up
    assert alive == []


def test_a_quick_grammar_overtakes_slow_ones_that_came_before_it() -> None:
    service = make_service(compile_timeout_s=40.0)
    try:
        slow = [service.compile(slow_grammar(number)) for number in range(2)]
        assert settle(service.compile(Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "a"'))).error is None
        assert all(ticket.state is CompileState.COMPILING for ticket in slow)
    finally:
        service.close()


class SlowProbe:
    """Says that everything compiles, in `compile_s`, and hands `packed` over."""

    def __init__(self, compile_s: float, packed: bytes | None = None) -> None:
        self._report = ProbeReport(verdict=ProbeVerdict.COMPILED, compile_s=compile_s, packed=packed)

    def load(self, backend: str) -> None:
        """It is there."""

    def try_compile(self, backend: str, constraint: Constraint, deadline: Deadline) -> ProbeReport:
        return self._report

    def close(self) -> None:
        """Nothing is left."""


@pytest.mark.parametrize(("compile_s", "expected"), [(4.0, CompileState.READY), (9.0, CompileState.FAILED)])
def test_what_could_not_be_compiled_again_in_the_time_that_is_left_is_too_slow(
    compile_s: float, expected: CompileState
) -> None:
    service = make_service(compile_timeout_s=10.0)
    service._probe.close()
    service._probe = SlowProbe(compile_s)  # type: ignore[assignment]  # the three methods that are used
    try:
        ticket = settle(service.compile(Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "a"')))
        assert ticket.state is expected
        assert (ticket.error is None) or "compile_timeout_s = 10" in ticket.error.message
    finally:
        service.close()


def test_what_the_probe_hands_over_is_not_compiled_again_and_may_take_all_the_time() -> None:
    pytest.importorskip("outlines_core")
    service = make_service(backend="outlines", compile_timeout_s=10.0)
    constraint = Constraint(kind=ConstraintKind.REGEX, value="(ab){2}")
    report = service._probe.try_compile("outlines", constraint, Deadline.after(SystemClock(), 60.0))
    assert report.packed is not None
    service._probe.close()
    service._probe = SlowProbe(9.0, report.packed)  # type: ignore[assignment]  # the three methods that are used
    try:
        # What is asked for here is not what was packed: whatever follows was not compiled in this process.
        assert accepts(service, Constraint(kind=ConstraintKind.REGEX, value="c{9}"), "abab")
    finally:
        service.close()


@dataclass
class Portable:
    """A backend whose every grammar packs into `num_bytes`."""

    num_bytes: int

    def pack(self, grammar: object) -> bytes:
        return bytes(self.num_bytes)

    def unpack(self, data: bytes) -> None:
        raise AssertionError("not in a probe")


def test_a_probe_keeps_what_would_take_long_to_unpack_beside_the_step_loop() -> None:
    assert probe_server._packed(Portable(1_000), None) == bytes(1_000)  # type: ignore[arg-type]
    assert probe_server._packed(Portable(17 << 20), None) is None  # type: ignore[arg-type]


def test_a_time_out_is_not_remembered_as_invalid(hasty_service: LocalGrammarService) -> None:
    first = settle(hasty_service.compile(slow_grammar(1)))
    second = hasty_service.compile(slow_grammar(1))
    assert first.state is CompileState.FAILED
    assert second.state is CompileState.COMPILING
    settle(second)


def test_memory_beyond_the_limit_fails_the_constraint_alone() -> None:
    service = make_service(compile_memory_bytes=16 << 20)
    try:
        ticket = settle(service.compile(large_grammar()))
        assert ticket.error is not None
        assert "compile_memory_bytes = 16777216" in ticket.error.message
        assert settle(service.compile(schema('{"type":"boolean"}'))).state is CompileState.READY
    finally:
        service.close()


def test_a_probe_server_that_died_is_replaced(service: LocalGrammarService) -> None:
    settle(service.compile(Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "a"')))
    server = psutil.Process(service.probe_server_pid())
    server.kill()
    server.wait()
    assert accepts(service, Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "b"'), "b")


def test_closing_ends_compilations_at_work() -> None:
    service = make_service()
    ticket = service.compile(slow_grammar(1))
    service.compile(Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "a"'))
    pid = wait_for_probe(service)
    service.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert settle(ticket).state is CompileState.FAILED


def wait_for_probe(service: LocalGrammarService) -> int:
    """Process id of the server once it has a probe at work."""
    done = settle(service.compile(Constraint(kind=ConstraintKind.GRAMMAR, value='root ::= "b"')))
    assert done.state is CompileState.READY
    pid = service.probe_server_pid()
    assert pid is not None
    return pid
