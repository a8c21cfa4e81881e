"""Why a server ended, from its log."""

from __future__ import annotations

from pilotage.serving.launch import cause

ENGINE = "(EngineCore pid=12) ERROR 11-30 04:40:01 [core.py:1136] "
API = "(APIServer pid=9) "


def test_the_first_traceback_is_the_cause() -> None:
    log = [
        "WARNING something else",
        f"{ENGINE}EngineCore failed to start.",
        f"{ENGINE}Traceback (most recent call last):",
        f'{ENGINE}  File "worker.py", line 3, in load',
        f"{ENGINE}    raise OSError(28)",
        f"{ENGINE}OSError: [Errno 28] No space left on device",
        f"{API}Traceback (most recent call last):",
        *[f'{API}  File "{n}.py", line 1' for n in range(30)],
        f"{API}RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    said = cause(log)
    assert said[0].startswith("Traceback") and "OSError: [Errno 28] No space left on device" in said


def test_a_long_traceback_keeps_its_end() -> None:
    log = ["Traceback (most recent call last):", *[f'  File "{n}.py"' for n in range(40)], "zmq.error.ZMQError: in use"]
    said = cause(log)
    assert said[-1] == "zmq.error.ZMQError: in use" and len(said) == 15


def test_without_a_traceback_the_end_is_all_there_is() -> None:
    assert cause([str(n) for n in range(40)]) == [str(n) for n in range(15, 40)]
