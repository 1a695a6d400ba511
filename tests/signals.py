"""What a process of tests does with signals that it, or a library of its, was made to ignore."""

import os
import signal
import threading


def heed() -> None:
    """Let signals that ask to stop end what is started from here on: what ignores one hands that down.

    nohup and shells let what they start in the background ignore SIGINT and SIGHUP. libtpu has the system ignore SIGHUP
    as it is loaded, and Python is not told, so it is set whatever Python thinks it is. Ctrl-C stays pytest's own.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_run_at(monkeypatch, step):
    """Have a run of this process get SIGTERM when it asks for the batch of an update."""
    from jformer.parallel.processes import stop
    from jformer.training.feed import make_feed

    def make_stopping(*given):
        feed = make_feed(*given)
        return lambda now: os.kill(os.getpid(), signal.SIGTERM) or feed(now) if now == step else feed(now)

    monkeypatch.setattr(stop, "_requested", threading.Event())  # later runs of this process are not asked
    monkeypatch.setattr("jformer.trainer.make_feed", make_stopping)
