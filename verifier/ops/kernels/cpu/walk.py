"""The code that walks a list of entries, and how the threads that walk it wait for each other.

::

    state    one cache line for each word that several threads write
    run      the caller sets a list, increments ``work``, walks the list as thread 0
    serve    each other thread waits until ``work`` changes, walks the list, and waits again
    walk     entry by entry: the kernel, then a barrier: no entry begins before all threads have ended the one before

A waiting thread spins for a while, since waits are usually short, and then sleeps on a futex: threads that spin forever
would take time from those that they wait for, on a machine with other load.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from string import Template

from foresay.verifier.ops.kernels.cpu.jit import Code, Processor

#: Offsets of the state's words, in bytes.
PLACES = {
    name: at * 64
    for at, name in enumerate(
        ("work", "arrived", "passed", "at_barrier", "at_rest", "stop", "entries", "count", "threads")
    )
}
#: Spins before a thread sleeps: at a barrier (some 50 us), and for the next list (some 500 us).
_LOOKS = {"barrier_looks": 2_000, "work_looks": 20_000}
#: The number of the system call.
_FUTEX = {"x86_64": 202, "aarch64": 98}


def unsupported() -> str | None:
    """Why kernels cannot run here, in words; None if they can."""
    system, machine = platform.system(), platform.machine()
    if system == "Linux" and machine in _FUTEX:
        return None
    return f"kernels for a CPU are made for Linux on x86-64 and aarch64, and this is {system} on {machine}"


class Walker:
    """The functions of ``_TEXT``. They release the interpreter's lock."""

    def __init__(self) -> None:
        own = _OF_X86 if Processor.here().is_x86 else _OF_OTHERS
        names = PLACES | _LOOKS | own | {"futex": _FUTEX[platform.machine()]}
        self._code = Code(Template(_TEXT).substitute(names))
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        serve = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        self.run, self.serve = run(self._code.address("run")), serve(self._code.address("serve"))


walker = cache(Walker)

#: Processor-specific code: a pause while spinning; and enabling denormals in every thread, whatever the caller has set
#: for its own (0x1F80: round to nearest, no exceptions).
_OF_X86 = {
    "declared": """
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
""",
    "pause": "call void @llvm.x86.sse2.pause()",
    "set": """
  %before = alloca i32
  %ours = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %before)
  store i32 8064, ptr %ours
  call void @llvm.x86.sse.ldmxcsr(ptr %ours)
""",
    "reset": "call void @llvm.x86.sse.ldmxcsr(ptr %before)",
}
_OF_OTHERS = {"declared": "", "pause": "fence acquire", "set": "", "reset": ""}
_TEXT = """
declare i64 @syscall(i64, ...)
$declared

; Wait until a word has another value than this: look for a while, then sleep. Whoever changes it wakes the sleepers.
define internal void @await(ptr %word, i32 %old, ptr %sleepers, i32 %looks) noinline {
begin:
  br label %look
look:
  %n = phi i32 [0, %begin], [%more, %again]
  %now = load atomic i32, ptr %word acquire, align 4
  %same = icmp eq i32 %now, %old
  br i1 %same, label %again, label %over
again:
  $pause
  %more = add i32 %n, 1
  %enough = icmp eq i32 %more, %looks
  br i1 %enough, label %tire, label %look
tire:
  %before = atomicrmw add ptr %sleepers, i32 1 seq_cst
  br label %check
check:
  %then = load atomic i32, ptr %word seq_cst, align 4
  %still = icmp eq i32 %then, %old
  br i1 %still, label %sleep, label %wake
sleep:  ; FUTEX_WAIT, private to this process
  %slept = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i32 128, i32 %old, ptr null)
  br label %check
wake:
  %after = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %over
over:
  ret void
}

define internal void @change(ptr %word, i32 %new, ptr %sleepers) noinline {
begin:
  store atomic i32 %new, ptr %word seq_cst, align 4
  %asleep = load atomic i32, ptr %sleepers seq_cst, align 4
  %any = icmp ne i32 %asleep, 0
  br i1 %any, label %wake, label %over
wake:  ; FUTEX_WAKE, all of them
  %woken = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i32 129, i32 2147483647)
  br label %over
over:
  ret void
}

define internal void @barrier(ptr %state, i32 %threads) {
begin:
  %arrived = getelementptr i8, ptr %state, i64 $arrived
  %passed = getelementptr i8, ptr %state, i64 $passed
  %sleepers = getelementptr i8, ptr %state, i64 $at_barrier
  %time = load atomic i32, ptr %passed monotonic, align 4
  %before = atomicrmw add ptr %arrived, i32 1 acq_rel
  %mine = add i32 %before, 1
  %last = icmp eq i32 %mine, %threads
  br i1 %last, label %open, label %wait
open:
  store atomic i32 0, ptr %arrived monotonic, align 4
  %next = add i32 %time, 1
  call void @change(ptr %passed, i32 %next, ptr %sleepers)
  ret void
wait:
  call void @await(ptr %passed, i32 %time, ptr %sleepers, i32 $barrier_looks)
  ret void
}

define internal void @walk(ptr %state, i64 %thread) {
begin:
  %entries_at = getelementptr i8, ptr %state, i64 $entries
  %entries = load ptr, ptr %entries_at
  %count_at = getelementptr i8, ptr %state, i64 $count
  %count = load i64, ptr %count_at
  %threads_at = getelementptr i8, ptr %state, i64 $threads
  %threads = load i64, ptr %threads_at
  %arriving = trunc i64 %threads to i32
  $set
  br label %head
head:
  %n = phi i64 [0, %begin], [%next, %entry]
  %more = icmp slt i64 %n, %count
  br i1 %more, label %entry, label %over
entry:
  %pair = getelementptr [2 x ptr], ptr %entries, i64 %n
  %kernel = load ptr, ptr %pair
  %arguments_at = getelementptr ptr, ptr %pair, i64 1
  %arguments = load ptr, ptr %arguments_at
  call void %kernel(ptr %arguments, i64 %thread, i64 %threads)
  call void @barrier(ptr %state, i32 %arriving)
  %next = add i64 %n, 1
  br label %head
over:
  $reset
  ret void
}

define void @run(ptr %state, ptr %entries, i64 %count) {
  %entries_at = getelementptr i8, ptr %state, i64 $entries
  store ptr %entries, ptr %entries_at
  %count_at = getelementptr i8, ptr %state, i64 $count
  store i64 %count, ptr %count_at
  %work = getelementptr i8, ptr %state, i64 $work
  %sleepers = getelementptr i8, ptr %state, i64 $at_rest
  %old = load i32, ptr %work
  %new = add i32 %old, 1
  call void @change(ptr %work, i32 %new, ptr %sleepers)
  call void @walk(ptr %state, i64 0)
  ret void
}

define void @serve(ptr %state, i64 %thread) {
begin:
  %work = getelementptr i8, ptr %state, i64 $work
  %sleepers = getelementptr i8, ptr %state, i64 $at_rest
  %stop_at = getelementptr i8, ptr %state, i64 $stop
  br label %idle
idle:
  %old = phi i32 [0, %begin], [%now, %begun]
  call void @await(ptr %work, i32 %old, ptr %sleepers, i32 $work_looks)
  %now = load atomic i32, ptr %work acquire, align 4
  %stop = load i32, ptr %stop_at
  %ends = icmp ne i32 %stop, 0
  br i1 %ends, label %over, label %begun
begun:
  call void @walk(ptr %state, i64 %thread)
  br label %idle
over:
  ret void
}
"""
