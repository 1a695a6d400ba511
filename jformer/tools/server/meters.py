"""Metrics of a server, in Prometheus' format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Meters:
    """Counts and durations of requests, sizes of batches, and the number of texts that wait."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        """Start at zero; `waiting` returns how many texts have no answer yet."""
        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter("jformer_requests", "Requests answered", ("path", "status"), registry=own)
        self._seconds = Histogram(
            "jformer_request_seconds", "Time of a request", ("path",), buckets=SECONDS, registry=own
        )
        self._batches = Histogram("jformer_batch_texts", "Texts answered together", buckets=SIZES, registry=own)
        Gauge("jformer_waiting_texts", "Texts not answered yet", registry=own).set_function(waiting)

    def note_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def note_batch(self, texts: int) -> None:
        """Count the texts of a batch."""
        self._batches.observe(texts)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
