"""The checks of `jformer.testing` pass for built-in parts and those of docs/parts.md, and fail for broken ones."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jformer
from jformer import testing
from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair, Split
from jformer.data.tokenizers import ByteTokenizer, learn
from jformer.decoding.greedy import greedy, one_by_one
from jformer.errors import UserError
from jformer.models import Attention, FeedForward
from jformer.tasks.batch_arrays import make_batch
from jformer.tasks.build import TASKS
from jformer.tasks.sums import Sum
from jformer.tasks.task import own_loss, token_loss
from jformer.training.optim import OPTIMIZERS, SCHEDULES
from tests.slow import slow_but
from tests.tasks.conftest import PAIRS, TEXTS, make_task

FAMILIES = {
    "lm": "decoder",
    "prefix_lm": "decoder",
    **dict.fromkeys(("classify", "tag", "qa", "mlm", "embed"), "encoder"),
}


@pytest.mark.parametrize("name", ["copy", "reverse", "sort"])
def test_built_in_sources_pass(name):
    testing.check_source(open_split, SourceConfig(source="generated", name=name, num_pairs=20))


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
def test_built_in_tokenizers_pass(kind):
    lines = [*testing.TEXTS, "the rose that rose in rows"] * 3
    testing.check_tokenizer(learn(kind, lines, 60, "nfkc", False), (*testing.TEXTS, "ｗｉｄｅ ﬁ 家"))


@pytest.mark.parametrize("name", slow_but(sorted(set(TASKS) - {"caption"}), "tag"))
def test_built_in_tasks_pass(name):
    _, config = make_task(name)
    pairs = PAIRS.get(name, [Pair("", text) for text in TEXTS])
    testing.check_task(TASKS[name], config, pairs, FAMILIES.get(name, "encdec"))


def test_a_task_is_given_what_a_run_gives_it():
    def mine(data, *, label_smoothing, scores, tokenize, lowercase, crf, family, temperature, symmetric):
        assert (family, crf, temperature, symmetric) == ("decoder", False, 0.05, False)
        return TASKS["lm"](data, label_smoothing=label_smoothing)

    testing.check_task(mine, make_task("lm")[1], [Pair("", text) for text in TEXTS], "decoder")


@pytest.mark.parametrize("name", SCHEDULES)
def test_built_in_schedules_pass(name):
    testing.check_schedule(SCHEDULES[name])


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "adamw"))
def test_built_in_optimizers_pass(name):
    testing.check_optimizer(OPTIMIZERS[name])


def test_an_optimizer_that_draws_random_numbers_passes():
    testing.check_optimizer(lambda schedule, *_: optax.chain(optax.add_noise(0.1, 0.55, 0), optax.adam(schedule)))


def test_an_optimizer_of_matrices_passes_layer_by_layer():
    testing.check_optimizer(lambda schedule, *_: jformer.per_layer(optax.contrib.muon(schedule)))
    testing.check_optimizer(lambda schedule, *_: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))


def test_the_built_in_loss_passes_and_completes_the_sums_of_another():
    testing.check_loss(token_loss(0.1))
    hidden, batch = jnp.ones((1, 3, 8)), make_batch(target=[[4, 5, 2]])
    sums = own_loss("tests.test_testing:mean_loss", token_loss(0.0))(hidden, lambda states: states, batch)
    assert sums["loss"].count == 1
    assert sums["nll"] == token_loss(0.0)(hidden, lambda states: states, batch)["nll"]
    with pytest.raises(UserError, match="no_loss': its sums lack 'loss'"):
        own_loss("tests.test_testing:no_loss", token_loss(0.0))(hidden, lambda states: states, batch)


@pytest.mark.slow
def test_built_in_layers_and_searches_pass():
    testing.check_layer(positions="rotary", activation="swiglu", norm_type="rmsnorm")
    testing.check_search(lambda step, cache, start, rules, options: greedy(step, cache, start, rules))


def drawn_source(config, split):
    pairs = [Pair(str(number), "x") for number in np.random.default_rng().integers(1000, size=50)]
    return Split(split, "1", lambda counts: iter(pairs))


class Rounded(ByteTokenizer):
    """Text whose ids depend on what else there is."""

    def encode(self, lines):
        return [ids[: 20 // len(lines)] for ids in super().encode(lines)]


class AllSeeing(Attention):
    """Attention that adds what comes last to everything."""

    def __call__(self, x, *args, **options):
        return super().__call__(x, *args, **options) + x[:, -1:]


class FlaxDropout(FeedForward):
    """A feed-forward with dropout of Flax."""

    def setup(self):
        super().setup()
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, dropout_key=None):
        return self.drop(super().__call__(x, dropout_key), deterministic=dropout_key is None)


class MadeInCall(FeedForward):
    """A feed-forward that makes a sublayer where it is called."""

    def __call__(self, x, dropout_key=None):
        return super().__call__(nn.Dense(x.shape[-1])(x), dropout_key)


class Rooted(FeedForward):
    """A feed-forward whose output is fine, but not its gradient."""

    def __call__(self, x, dropout_key=None):
        return super().__call__(x, dropout_key) + jnp.sqrt(x - x)


def mean_loss(hidden, project, batch):
    found = token_loss(0.0)(hidden, project, batch)["loss"]
    return {"loss": Sum(found.total / found.count, 1.0)}


def no_loss(hidden, project, batch):
    return {}


def widened(*_):
    """Descent whose state, a number of updates, becomes a float."""

    def update(gradient, count, params):
        return jax.tree.map(lambda leaf: -0.1 * leaf, gradient), count + 1.0

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def scoreless(step, cache, start, rules, options):
    def choose(log_probs, logits, index):
        values, tokens = log_probs.top_k(1)
        return 0 * values[:, 0], tokens[:, 0]

    return one_by_one(step, cache, start, rules, choose, hypotheses=1)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: testing.check_source(drawn_source, SourceConfig()), "read twice, a split differs"),
        (lambda: testing.check_tokenizer(Rounded("identity")), "ids depend on the texts beside it"),
        (lambda: testing.check_loss(mean_loss), "the sums of two rows do not add up"),
        (
            lambda: testing.check_loss(lambda *_: {"loss": Sum(jnp.float32(1), 0.5)}),
            "the sums of two rows do not add up",
        ),
        (lambda: testing.check_loss(lambda *_: {"nll": Sum(0.0, 1.0)}), "without 'loss'"),
        (lambda: testing.check_score(lambda answers, references: float("nan")), "the score is nan"),
        (lambda: testing.check_schedule(lambda step, params: -1.0), "negative"),
        (lambda: testing.check_optimizer(lambda *_: optax.sgd(-0.1)), "did not lower"),
        (lambda: testing.check_optimizer(lambda rate, *_: optax.contrib.muon(rate)), r"stack.*in jformer\.per_layer"),
        (
            lambda: testing.check_optimizer(lambda rate, *_: optax.lamb(rate)),
            r"of a layer is updated differently in a stack",
        ),
        (lambda: testing.check_optimizer(widened), "changed a shape or a dtype"),
        (lambda: testing.check_layer(attention="tests.test_testing:AllSeeing"), "a later token leaks"),
        (lambda: testing.check_layer(feed_forward="tests.test_testing:FlaxDropout"), r"layers\.dropout.*for \"dropout"),
        (lambda: testing.check_layer(feed_forward="tests.test_testing:MadeInCall"), r"make sublayers in setup\(\)"),
        (lambda: testing.check_layer(feed_forward="tests.test_testing:Rooted"), "not finite: a gradient"),
        (lambda: testing.check_search(scoreless), "score 0"),
    ],
)
def test_a_broken_part_fails_with_what_is_wrong(check, message):
    with pytest.raises(AssertionError, match=message):
        check()


@pytest.mark.slow
def test_a_task_whose_loss_teaches_nothing_fails():
    _, config = make_task("translate")

    def constant(data, **options):
        task = TASKS["translate"](data, **options)

        def loss(hidden, project, batch):
            sums = task.loss(hidden, project, batch)
            return {**sums, "loss": sums["loss"]._replace(total=jnp.float32(1))}

        return task._replace(loss=loss)

    with pytest.raises(AssertionError, match="moves no parameter"):
        testing.check_task(constant, config, PAIRS["translate"])
