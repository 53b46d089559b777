"""Device functions that the compiler has not inlined, and functions that a module only declares."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import STORE_R1, program, run, words_of

from ptxlab.checks import all_checks
from ptxlab.errors import EmulatorError
from ptxlab.ptx import parse

# square(x) = x * x, and odd ones through helper(x, y) = y + 1, with registers, labels, local
# memory and parameters of the names that the callers have.
FUNCTIONS = """
.extern .func (.param .b32 func_retval0) vprintf
(
    .param .b64 vprintf_param_0,
    .param .b64 vprintf_param_1
)
;
.func  (.param .b32 func_retval0) helper(
    .param .b32 helper_param_0,
    .param .b64 helper_param_1
)
{
    .reg .b32 %r<3>; .reg .b64 %rd<2>; .reg .pred %p<2>;
    ld.param.u32 %r1, [helper_param_0];
    setp.gt.u32 %p1, %r1, 4;
    @%p1 bra BIG;
    ld.param.u64 %rd1, [helper_param_1];
    cvt.u32.u64 %r2, %rd1;
    add.u32 %r1, %r2, 1;
    st.param.b32 [func_retval0+0], %r1;
    ret;
BIG:
    st.param.b32 [func_retval0], 1000;
    ret;
}
.func  (.param .b32 func_retval0) square(.param .b32 square_param_0)
{
    .local .align 4 .b8 depot[8];
    .reg .b32 %r<6>; .reg .b64 %rd<2>; .reg .pred %p<2>;
    ld.param.u32 %r1, [square_param_0];
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %p1, %r2, 0;
    mul.lo.u32 %r3, %r1, %r1;
    st.local.u32 [depot+4], %r3;
    @%p1 bra BIG;
    cvt.u64.u32 %rd1, %r3;
    {
    .param .b32 param0;
    st.param.b32 [param0+0], %r1;
    .param .b64 param1;
    st.param.b64 [param1+0], %rd1;
    .param .b32 retval0;
    call.uni (retval0), helper, (param0, param1);
    ld.param.b32 %r4, [retval0+0];
    }
    st.local.u32 [depot+4], %r4;
BIG:
    ld.local.u32 %r5, [depot+4];
    st.param.b32 [func_retval0+0], %r5;
    ret;
}
.func nothing() { .reg .b32 %r<2>; mov.u32 %r1, 77; ret; }
.func forever() { call.uni forever; ret; }
"""
CALL = """
    {{ // callseq
    .param .b32 param0;
    st.param.b32 [param0+0], {given};
    .param .b32 retval0;
    {guard} call.uni (retval0),
    square,
    (
    param0
    );
    ld.param.b32 {result}, [retval0+0];
    }}
"""


def square(x: int) -> int:
    if x % 2 == 0:
        return x * x
    return 1000 if x > 4 else x * x + 1


def called(given: str, result: str, guard: str = "") -> str:
    return CALL.format(given=given, result=result, guard=guard)


def test_functions_that_call_functions() -> None:
    """Threads diverge within them, and return early."""
    body = called("%r60", "%r2") + called("%r2", "%r3") + "add.u32 %r1, %r2, %r3;"
    want = [square(x) + square(square(x)) for x in range(32)]
    assert words_of(body, module=FUNCTIONS) == want


def test_a_function_that_some_threads_call() -> None:
    body = "setp.lt.u32 %p1, %r60, 10; mov.u32 %r1, 5; @!%p1 bra SKIP;"
    body += called("%r60", "%r1") + "call.uni nothing; SKIP:"
    want = [square(x) if x < 10 else 5 for x in range(32)]
    assert words_of(body, module=FUNCTIONS) == want


def test_a_call_under_a_guard() -> None:
    body = "setp.lt.u32 %p1, %r60, 10;" + called("%r60", "%r2", "@%p1")
    body += "selp.u32 %r1, %r2, 5, %p1;"
    want = [square(x) if x < 10 else 5 for x in range(32)]
    assert words_of(body, module=FUNCTIONS) == want


def test_calls_have_no_findings_and_count_their_own_instructions() -> None:
    out = np.zeros(64, np.uint32)
    text = program(called("%r60", "%r1") + STORE_R1 + "ret;", 1, module=FUNCTIONS)
    result = run(text, [(out, True)], threads=64, observers=all_checks())
    assert result.findings == []
    assert out.tolist() == [square(x) for x in range(64)]
    assert result.instructions["mul.lo.u32"] == 2


def test_a_recursive_function_is_an_error_with_its_line() -> None:
    text = program("call.uni forever; ret;", 1, module=FUNCTIONS)
    line = text[: text.index("call.uni forever; ret; }")].count("\n") + 1
    with pytest.raises(EmulatorError, match=rf"PTX line {line}: forever calls itself; recursive"):
        run(text, [(np.zeros(32, np.uint32), True)])


def test_a_function_without_a_body_is_an_error_only_where_it_is_called() -> None:
    call = "{ .param .b64 param0; st.param.b64 [param0], %rd1; .param .b64 param1;\n"
    call += "st.param.b64 [param1], %rd1; .param .b32 retval0;\n"
    call += "call.uni (retval0), vprintf, (param0, param1); ld.param.b32 %r1, [retval0]; }"
    body = f"setp.gt.u32 %p1, %r60, 99; mov.u32 %r1, 3; @!%p1 bra SKIP; {call} SKIP:"
    assert words_of(body, module=FUNCTIONS) == [3] * 32
    with pytest.raises(EmulatorError, match="thread 0 calls vprintf"):
        words_of(call, module=FUNCTIONS)


def test_a_call_through_a_pointer_is_an_error() -> None:
    body = "mov.u64 %rd3, square; .param .b32 a; proto: .callprototype _ (.param .b32 _);\n"
    body += "call %rd3, (a), proto;"
    with pytest.raises(EmulatorError, match="calls through pointers"):
        words_of(body + "mov.u32 %r1, 0;", module=FUNCTIONS)


def test_the_functions_of_a_module() -> None:
    module = parse(program("ret;", 1, module=FUNCTIONS))
    assert list(module.function_heads) == ["helper", "square", "nothing", "forever"]
    helper = module.function("helper")
    assert [p.name for p in helper.parameters] == ["helper_param_0", "helper_param_1"]
    assert [(p.name, p.size) for p in helper.results] == [("func_retval0", 4)]
