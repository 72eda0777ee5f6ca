import io

from ropewalk.load_tests.common.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_line_a_run():
    out = io.StringIO()
    progress = Progress(out)
    progress.start("closed, round 1 of 3")
    for answered in range(5):
        progress.answered(answered, 5, 10)
    progress.clear()
    assert out.getvalue() == "closed, round 1 of 3\n"


def test_a_terminal_gets_one_line_rewritten():
    out, now = Terminal(), [0.0]
    progress = Progress(out, lambda: now[0])
    progress.start("closed")
    now[0] = 2.0
    progress.answered(2, 64, 40)
    progress.answered(3, 64, 20)
    assert out.getvalue().endswith("\r\x1b[2Kclosed: 3/64, 30 tok/s")
    progress.clear()
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[2K")


def test_notes_are_for_terminals():
    live, out = Terminal(), io.StringIO()
    for each in (live, out):
        Progress(each).note("starting: 3 s")
    assert live.getvalue().endswith("starting: 3 s")
    assert out.getvalue() == ""


def test_the_time_left_is_told_from_the_runs_that_are_over():
    out, now = io.StringIO(), [100.0]
    progress = Progress(out, lambda: now[0])
    progress.schedule(20)
    progress.start("a")
    now[0] = 110.0
    progress.finish()
    progress.start("b")
    for _ in range(16):
        progress.finish()
    now[0] = 134.0
    progress.start("c")
    assert out.getvalue() == "a\nb, 3 min left\nc, 6 s left\n"
