import io

from load_tests.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_line_a_run():
    out = io.StringIO()
    progress = Progress(out)
    progress.start("closed, run 1 of 3")
    for answered in range(5):
        progress.tick(answered, 5)
    progress.clear()
    assert out.getvalue() == "closed, run 1 of 3\n"


def test_a_terminal_gets_one_line_rewritten():
    out = Terminal()
    progress = Progress(out)
    progress.start("closed")
    progress.tick(3, 64)
    assert out.getvalue().endswith("closed: 3 of 64 answered")
    progress.clear()
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[2K")
