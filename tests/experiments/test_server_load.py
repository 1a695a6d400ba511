import pytest

from experiments.faults.server_clients import Asked
from experiments.faults.server_load import tell

ANSWERED = {"answers": [{"outputs": [{"text": "b"}]}]}


@pytest.mark.parametrize(
    ("answered", "told"),
    [
        (3, "3 of 5 answered, 0 not as predict; 3 a second, p50 1,000 ms"),
        (1, "1 a second, p50 nan ms"),
        (0, "0 a second"),
    ],
)
def test_refused_requests_are_in_no_rate_and_no_percentile(capsys, answered, told):
    asked = [Asked(200, ANSWERED, 1.0)] * answered + [Asked(503, {}, 0.0)] * (5 - answered)
    tell("clients", asked, ["b"] * 5, 1.0)
    assert told in capsys.readouterr().out
