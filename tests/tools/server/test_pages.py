"""The server's pages in a real browser: what is answered is shown as text, and nothing comes from elsewhere."""

import re
import types

import pytest

from jformer.tools.server.engine import Engine
from tests import browser
from tests.tools.server.serving import LIMITS, ask, served, small_predictor


@pytest.fixture(scope="module")
def predictor(tiny):
    return small_predictor(tiny)


TEXT = f"two\u2028lines{browser.HOSTILE}"  # a line separator, which JSON leaves as it is
ANSWER = {"outputs": [{"text": TEXT, "score": -1.0}, {"text": "second", "score": -2.0}]}


STARTS = "(text) => document.querySelector('#answers .answer span').innerText.startsWith(text)"


class Growing:
    """Tells one half of an answer, then all of it."""

    def __init__(self, groups):
        self.running = True
        self._told = [(TEXT[:-9], None), (TEXT, ANSWER)]

    def advance(self):
        text, outputs = self._told.pop(0)
        self.running = bool(self._told)
        return [types.SimpleNamespace(request=0, text=text, outputs=outputs)]

    def leave(self, request):
        self.running = False


@pytest.mark.parametrize("streams", [True, False], ids=["while they grow", "at once"])
def test_the_page_asks_and_shows_what_is_answered_as_text(predictor, monkeypatch, streams):
    engine = Engine(predictor, LIMITS)
    monkeypatch.setattr(engine, "answer", lambda requests: iter([dict.fromkeys(range(len(requests)), ANSWER)]))
    monkeypatch.setattr(engine, "grow", Growing)
    monkeypatch.setattr(engine, "record", lambda outputs: outputs)
    facts = {**engine.facts(), "streams": streams}
    monkeypatch.setattr(engine, "facts", lambda: facts)
    with served(engine) as port:
        with browser.used(f"http://127.0.0.1:{port}/#abc") as tab:
            tab.wait_for_selector("#answers li")
            html = tab.content()
        style = ask(port, "/page.css")[1]
        streamed = [line for line in ask(port, "/metrics")[1].splitlines() if "jformer_batch_texts_count" in line]
    assert '<span dir="auto">second</span>' in html
    assert "&lt;img src=x onerror" in html
    assert "<img" not in html
    assert streamed == [f"jformer_batch_texts_count {float(not streams)}"]
    assert browser.barriers(still(html, style)) == []


class Breaking(Growing):
    """Tells one half of an answer, then fails."""

    def advance(self):
        if len(self._told) == 1:
            raise RuntimeError("broken")
        return super().advance()


def test_an_error_leaves_no_answer_that_still_grows(predictor, monkeypatch):
    engine = Engine(predictor, LIMITS)
    monkeypatch.setattr(engine, "grow", Breaking)
    with served(engine) as port, browser.used(f"http://127.0.0.1:{port}/#50% + 1%25 & so on") as tab:
        tab.wait_for_selector("#status.error")
        assert tab.input_value("#source") == "50% + 1% & so on"  # typed into the address, and encoded
        assert tab.locator("#answers > *").count() == 0


def still(page, style):
    """Return a page without programs, and with its style in it."""
    return re.sub("<script.*?</script>", "", page).replace("</head>", f"<style>{style}</style></head>")


def test_the_page_is_used_by_keyboard(predictor):
    with served(Engine(predictor, LIMITS)) as port, browser.used(f"http://127.0.0.1:{port}/") as tab:
        tab.keyboard.type("ab c")  # which the page is ready for when it opens
        tab.wait_for_selector("#answers button")
        browser.go_to(tab, "#answers button")
        tab.keyboard.press("Enter")  # to look inside
        tab.wait_for_selector("#tokens button")
        assert tab.locator("#attended span").all_inner_texts() == ["a", "b", "␣", "c", "</s>"]
        browser.tabbed(tab)
        browser.go_to(tab, '#tokens button[aria-pressed="false"]')
        tab.keyboard.press("Enter")
        assert tab.evaluate("() => document.activeElement.getAttribute('aria-pressed')") == "true"
        begun = tab.locator("#likeliest button").last
        prefix = begun.get_attribute("title").removesuffix(" …")
        assert not tab.inner_text("#answers .answer span >> nth=0").startswith(prefix)
        begun.focus()
        tab.keyboard.press("Enter")  # to take the least likely of them
        tab.wait_for_function(STARTS, arg=prefix)
        tab.wait_for_function("() => document.activeElement.getAttribute('aria-pressed') === 'true'")
        assert tab.inner_text('#tokens button[aria-pressed="true"]') == prefix[-1].replace(" ", "␣")
