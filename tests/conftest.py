"""How tests run, and which of them run only with `scripts/test --full`."""

import gc
import logging
import os
import signal
from pathlib import Path

import pytest

# Long, and late in the alphabet: they run first, so that no worker is left alone with one.
FIRST = (
    "browser/test_page.py",
    "browser/test_panels.py",
    "server/test_end_to_end.py",
    "server/test_overflow.py",
    "server/test_provenance.py",
    "server/test_registry.py",
    "server/test_seeded_bugs.py",
    "tests/test_readme.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run the tests marked `full` as well, and search at random, and for longer",
    )


def pytest_configure(config):
    # A shell's background job ignores SIGINT, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--full"):
        os.environ.setdefault("STATEFUL_EXAMPLES", "100")
    if config.getoption("dist", "no") == "no":  # else this process only distributes work
        _prepare(full=config.getoption("--full"))


@pytest.fixture(scope="session")
def kernels():
    """The compiled CPU kernels, cached where the server keeps them, to save seconds."""
    from ropewalk.model.kernels.cpu.bindings import load
    from ropewalk.server.download import home

    return load(home() / "kernels")


@pytest.fixture(scope="session", autouse=True)
def tried_tokenizers():
    """Files of tokenizers that have passed their trial pass it again without a process."""
    from ropewalk.model.tokenizers import trial

    attempt, passed = trial.attempt, set()

    def attempt_once(module, packages, file, **limits):
        asked = (module, file, *limits.values())
        reply = b"" if asked in passed else attempt(module, packages, file, **limits)
        if not reply:
            passed.add(asked)
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "attempt", attempt_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def quickened():
    """Triton's interpreter, which may run in the tests of any folder."""
    from tests.interpreter import quicken

    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that a second thread only costs time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _prepare(full):
    """Set up a process that runs tests, so that they start seconds sooner."""
    import hypothesis

    gc.disable()  # until all tests are collected: what is imported stays
    with pytest.MonkeyPatch.context() as patch:
        # OpenMP reads it when torch loads: a thread that spins for 10 ms keeps a core from others.
        patch.setenv("OMP_WAIT_POLICY", "passive")
        import torch
    # Every HTTP client would load the certificates of all authorities, which takes 90 ms. OpenSSL
    # looks one up in a folder only when a server shows its own.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

    if not torch.cuda.is_available():
        # Triton reads it when it is first imported, by any module.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if not full:
        hypothesis.settings.register_profile("usual", max_examples=50)
        hypothesis.settings.load_profile("usual")


def pytest_xdist_make_scheduler(config, log):
    """Files as a whole to one worker, and those of a package that starts a browser together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "browser" if "tests/browser/" in file else file

    return Scheduling(config, log)


def pytest_collection_finish():
    # pytest turns to each logger six times for every test, and two libraries have hundreds.
    loggers = logging.root.manager.loggerDict
    for name in [*loggers]:
        if name.startswith(("torch.", "transformers.")):
            del loggers[name]
    gc.freeze()  # a million objects that later collections need not look at
    gc.set_threshold(20_000, 20, 100)  # little of the garbage of tests lives until the third look
    gc.enable()


def pytest_sessionfinish():
    gc.collect()  # here what is left may still complain
    gc.freeze()  # pytest is about to collect five times, which takes seconds


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not str(item.path).endswith(FIRST))
    if config.getoption("--full"):
        return
    config.hook.pytest_deselected(items=[item for item in items if _only_in_full(item)])
    items[:] = [item for item in items if not _only_in_full(item)]


def _only_in_full(item):
    return item.get_closest_marker("full") is not None
