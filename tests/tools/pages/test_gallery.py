"""The gallery: its numbers are those of the modules, and what is edited in a browser is computed as models do."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.main import main
from jformer.models.layers.dot_product import attend
from jformer.models.layers.positions import sinusoids
from jformer.tools.pages import gallery
from tests import browser
from tests.slow import slow_but


@pytest.fixture(scope="module")
def page():
    return gallery.gallery(resolve(default_config("transformer_tiny")))


def cells(page, first):
    """Return the cells of the table's row that begins with a text."""
    (row,) = re.findall(rf"<tr><td[^>]*>{re.escape(first)}</td>(.*?)</tr>", page)
    return re.findall(r"<td[^>]*>(.*?)</td>", row)


@pytest.mark.slow
def test_parameters_stand_beside_what_the_papers_say(page):
    assert cells(page, "gpt2") == ["12 x 768", "117M", "124,439,808", "0.0%", "22.8%", "45.5%", "31.0%", "0.6%", "0.0%"]
    assert cells(page, "gpt3_175b")[1:3] == ["175.0B", "174,604,259,328"]
    assert cells(page, "this config")[2] == f"{1_325_056 + Config().data.vocab_size * 128:,}"


def test_a_shift_of_positions_is_the_same_map_everywhere():
    table = np.asarray(sinusoids(40, 32))
    matrix, error = gallery.shifted(table, 3)
    assert error < 1e-6
    assert np.abs(matrix @ matrix.T - np.eye(32)).max() < 1e-6  # a rotation
    assert gallery.shifted(np.roll(table, 1, axis=1), 3)[1] > 0.5


def test_products_of_sinusoids_depend_on_the_distance_alone():
    draw = np.random.default_rng(0)
    by_distance, spread = gallery.products_by_distance(np.asarray(sinusoids(40, 32)))
    rates = 10_000.0 ** (-np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(by_distance, np.cos(np.arange(40)[:, None] * rates).mean(axis=1), atol=1e-6)
    assert spread < 1e-6
    assert gallery.products_by_distance(draw.standard_normal((40, 32)))[1] > 0.5


def test_wide_models_show_every_nth_pair_of_features():
    table, kept = gallery.encoded(2_048)
    assert table.shape == (gallery.LENGTH, gallery.WIDTH)
    assert kept[:4] == [0, 1, 8, 9]
    np.testing.assert_array_equal(table, np.asarray(sinusoids(gallery.LENGTH, 2_048))[:, kept])


@pytest.mark.parametrize("preset", slow_but(["vit_s16", "luong_tiny"], "vit_s16"))
def test_other_families_have_the_page(preset, monkeypatch):
    monkeypatch.setattr(gallery, "PUBLISHED", {})
    found = gallery.gallery(resolve(default_config(preset)))
    assert ("forward FLOPs of an image" in found) == (preset == "vit_s16")


def test_the_command_needs_neither_config_nor_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gallery, "PUBLISHED", {})
    output = tmp_path / "page.html"
    assert main(["jformer", "--mode=gallery", f"--output={output}", "--config.model.d_model=64"]) == 0
    assert re.search(r"page\.html: \d+ kB; open it in a browser", capsys.readouterr().out)
    assert "d_model 64" in output.read_text()
    assert main(["jformer", "--mode=gallery"]) == 2
    assert "--mode=gallery writes a page: name a file" in capsys.readouterr().err


def test_nothing_keeps_people_out_and_narrow_windows_are_enough(page):
    assert browser.barriers(page) == []
    assert browser.overhang(page) == (0, 0)


TABLE = """(rows) => rows.map((row) =>
  [...row.querySelectorAll("td")].map((cell) => Number(cell.textContent.replace("−", "-"))))"""


def test_a_step_of_attention_is_edited_by_keyboard_and_computed_as_models_do(page):
    numbers = np.array([gallery.EMBEDDINGS] * 3, np.float32)
    with browser.used(page) as tab:
        assert len(browser.tabbed(tab)) > 50

        def shown(caption):
            return tab.locator(f"table:has(caption:text('{caption}')) tbody tr").evaluate_all(TABLE)

        def expect(causal):
            q, k, v = jnp.asarray(numbers)[:, None, :, None]
            mask = jnp.tril(jnp.ones((1, 1, 3, 3), bool)) if causal else None
            output, weights = attend(q, {"k": k, "v": v}, mask, scale=4**-0.5)
            np.testing.assert_allclose(shown("Weights:"), weights[0, 0], atol=5.1e-5)
            np.testing.assert_allclose(shown("Output:"), output[0, :, 0], atol=5.1e-5)

        expect(causal=False)
        for place, (name, row, column) in enumerate((("query", 0, 1), ("key", 1, 3), ("value", 2, 0))):
            browser.go_to(tab, f"[aria-label='{name} of {gallery.WORDS[row]}, feature {column + 1}']")
            tab.keyboard.type("-2.5")
            numbers[place, row, column] = -2.5
            expect(causal=False)
        browser.go_to(tab, "#causal")
        tab.keyboard.press("Space")
        expect(causal=True)
        assert tab.inner_text("#step output").startswith("The takes 100 % of The")  # whose query was edited
