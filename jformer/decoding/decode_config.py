"""Every option of decoding, with its default and its source. Imports no JAX."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypedDict

from jformer.errors import UserError, check_least
from jformer.plugins import check_part, is_own

SEARCHES = ("beam", "sample", "mbr")
UTILITIES = ("chrf", "bleu")
AVERAGES = ("probability", "log_probability")
INPUTS = ("text", "jsonl")
OUTPUTS = ("text", "tsv", "jsonl", "conll")
OVERLONG = ("cut", "split")
POOLINGS = ("", "mean", "first", "last", "pooler")
DTYPES = ("", "float32", "bfloat16", "auto")
COLDEST = 1e-6  # the lowest temperature: log-probabilities divided by it must stay finite
LONGEST = 2**20  # tokens beyond a source, or of an n-gram: the arrays of a search are that long for any output
BEAM_ONLY = ("beam_size", "length_penalty", "length_offset", "coverage_penalty", "patience", "ended_first",
             "beam_groups", "diversity")  # fmt: skip
PRESET = ("beam_size", "length_penalty", "length_offset", "seed")  # allowed to stay set when another search is chosen
SAMPLE_ONLY = ("samples", "temperature", "top_k", "top_p", "min_p", "epsilon", "typical", "seed")
SEARCHES_ALONE_READ = (*(key for key in (*BEAM_ONLY, *SAMPLE_ONLY) if key not in PRESET), "search", "ensemble",
                       "rerank", "min_length", "max_length", "no_repeat_ngram", "repetition_penalty", "forced_start",
                       "forced_end", "renormalize", "forbid", "only")  # fmt: skip
# Options of files and other models: neither compiled programs nor greedy answers depend on them.
OF_RUNS = ("pooling", "ensemble", "inputs", "outputs", "scores", "batch_size")
NO_PROGRAM_READS = (*OF_RUNS, "forced_start", "forbid", "only", "source_language", "target_language", "alignments",
                    "overlong")  # fmt: skip
NO_SEARCH_OF_IDS_READS = (*NO_PROGRAM_READS, "max_length", "max_extra_length", "max_answer_length",
                          "no_answer_threshold", "normalize", "ensemble_average", "dtype", "mbr_utility",
                          "rerank")  # fmt: skip
NO_GREEDY_ANSWER_READS = (*OF_RUNS, *BEAM_ONLY, *SAMPLE_ONLY, "mbr_utility", "normalize", "ensemble_average", "dtype")


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How text is generated; the defaults are those of Vaswani et al. 2017, section 6.1. Lengths are in tokens."""

    # beam (beam_size=1 is greedy) | sample | mbr: the best of some samples by their agreement (Eikema and Aziz 2020)
    search: str = "beam"
    beam_size: int = 4  # hypotheses kept at every step (section 6.1); 1 = greedy, the fastest
    length_penalty: float = 0.6  # alpha of Wu et al. 2016, equation 14: ((k + length) / (k + 1)) ** alpha; 0 = none
    length_offset: float = 5.0  # k of Wu et al. 2016, equation 14; 0 divides by length ** alpha, as transformers does
    coverage_penalty: float = 0.0  # beta of Wu et al. 2016, equation 14: source tokens with little attention; encdec
    beam_groups: int = 1  # groups of beams that are kept apart from each other (Vijayakumar et al. 2018)
    diversity: float = 0.5  # what a token costs for each beam of earlier groups that chose it (Vijayakumar et al. 2018)
    # Stop once patience x beam_size outputs are finished (Kasai et al. 2022); 0 = once no better one can follow.
    patience: float = 0.0
    # Outputs that ended come before those cut at their limit, regardless of score; False: all are ranked by score, as
    # in transformers, except for inputs with constraints.
    ended_first: bool = True
    n_best: int = 1  # outputs for each input, best first; at most beam_size, or samples of mbr

    samples: int = 1  # sample: outputs for each input; mbr: candidates, 32 or more for good quality
    temperature: float = 1.0  # divides the logits
    top_k: int = 0  # sample from the k most probable tokens; 0 = all (Fan et al. 2018)
    top_p: float = 1.0  # from the most probable that hold this mass; 1 = all (Holtzman et al. 2020)
    min_p: float = 0.0  # from those with at least this share of the largest probability (Nguyen et al. 2024)
    epsilon: float = 0.0  # from those with at least this probability (Hewitt et al. 2022)
    typical: float = 1.0  # from the mass of most expected surprise; 1 = all (Meister et al. 2023)
    seed: int = 0  # a sample is drawn from (seed, number of its input line and piece, number of the sample)
    # mbr: chrf | bleu, of sacreBLEU, of each candidate against all of them (Eikema and Aziz 2020), or a command's name,
    # which scores samples x samples texts for each input
    mbr_utility: str = "chrf"
    # The name of an evaluate.command that scores all candidates (beam_size, or samples) without references: the n_best
    # by its scores are the outputs (Fernandes et al. 2022); "" = none.
    rerank: str = ""

    min_length: int = 0  # minimum number of tokens before the end symbol
    max_length: int = 0  # maximum number of tokens; 0 = limited by max_extra_length alone
    max_extra_length: int = 50  # an output is at most its source plus this long (section 6.1); an image has no length
    no_repeat_ngram: int = 0  # no n-gram of this size appears twice in an output; 0 = off (Paulus et al. 2018)
    repetition_penalty: float = 1.0  # multiplies the log-probability of earlier tokens (Keskar et al. 2019)
    # Outputs begin with the symbols that the vocabulary puts before every target, such as a language or BART's <s>.
    # False: a search may write anything there, as transformers does without forced_bos_token_id.
    forced_start: bool = True
    # An output that reaches its limit ends there: its last token is the end symbol, at no cost, as with
    # forced_eos_token_id of transformers. Inputs with constraints are cut instead. For samples, that token has the
    # model's own log-probability, like all others.
    forced_end: bool = False
    # The probabilities of the tokens that the other rules allow sum to 1, as in transformers and always for samples.
    renormalize: bool = False
    forbid: tuple[str, ...] = ()  # entries of the vocabulary that are never written, such as "<unk>"
    only: tuple[str, ...] = ()  # if set: the only entries that are written, besides the end symbol

    max_answer_length: int = 30  # qa: words of an answer, at most
    # qa: by how much the log-probability of an answer must exceed that of no answer (Devlin et al. 2019, section 4.3);
    # -1000 always answers. Tune it on validation text.
    no_answer_threshold: float = 0.0

    # embed: the vector of a text: mean (of all its tokens) | first | last | pooler (BERT's projection of the first) |
    # "": as learned by task embed (model.head.pooling), for other tasks mean
    pooling: str = ""
    normalize: bool = False  # embed: vectors have unit length, so that dot products are cosines

    ensemble: tuple[str, ...] = ()  # workdirs of further runs to average with this one
    ensemble_average: str = "probability"  # probability | log_probability: what is averaged

    # multilingual translate: the source language of inputs that do not name it; "" = that of the first corpus
    source_language: str = ""
    target_language: str = ""  # the same for the target language
    # predict reads lines of text | jsonl: {"source", "prefix", "constraints"}, "source_language" and "target_language"
    inputs: str = "text"
    # predict writes text | conll (tags) | tsv | jsonl: with scores, n-best, alignments on request
    outputs: str = "text"
    scores: bool = False  # predict writes scores; tsv and jsonl
    alignments: bool = False  # predict writes source-target pairs of tokens in Pharaoh format; tsv and jsonl, encdec
    # An input over the model's limit is cut | split into pieces (always for tagged words), at ends of sentences or else
    # spaces, if it has any; both are counted.
    overlong: str = "cut"

    batch_size: int = 64  # inputs decoded together
    dtype: str = ""  # of activations while decoding: "" = the model's | float32 | bfloat16 | auto: see model.dtype

    @property
    def hypotheses(self) -> int:
        """The rows of a batch that an input takes."""
        return self.beam_size if self.search == "beam" else self.samples

    @property
    def returned(self) -> int:
        """Outputs for each input."""
        return self.samples if self.search == "sample" and not self.rerank else self.n_best

    @property
    def ranked_by(self) -> str:
        """The name of the command that ranks candidates; "" = none does."""
        return self.mbr_utility * (self.search == "mbr" and self.mbr_utility not in UTILITIES) or self.rerank

    def check(self, searched: bool = True) -> None:
        """Raise UserError for the first invalid option or combination of options.

        n_best is limited by the beam only if answers are `searched` for.
        """
        check_part("decode.search", self.search, SEARCHES)
        choices = {"inputs": INPUTS, "outputs": OUTPUTS, "overlong": OVERLONG, "dtype": DTYPES, "pooling": POOLINGS}
        for key, allowed in {"ensemble_average": AVERAGES, **choices}.items():
            if getattr(self, key) not in allowed:
                names = ", ".join(map(repr, allowed))
                raise UserError(f"decode.{key}={getattr(self, key)!r}; choose one of: {names}")
        ones = "beam_size beam_groups n_best samples max_extra_length batch_size max_answer_length repetition_penalty"
        zeros = "length_penalty length_offset patience coverage_penalty diversity top_k min_length max_length seed"
        check_least("decode", self, tuple(ones.split()), 1)
        check_least("decode", self, (*zeros.split(), "no_repeat_ngram"), 0)
        for key in ("max_extra_length", "no_repeat_ngram"):
            if getattr(self, key) > LONGEST:
                raise UserError(
                    f"decode.{key}={getattr(self, key)} must be at most {LONGEST}: memory is reserved for it"
                )
        self._check_probabilities()
        self._check_search(searched)
        self._check_outputs()

    def refuse_unread(self) -> None:
        """Raise UserError for beam search options that others leave without effect; saved runs may have them."""
        if self.search != "beam" or self.beam_size == 1:
            return
        if self.beam_groups == 1 and self.diversity != DEFAULTS["diversity"]:
            raise UserError(f"decode.diversity={self.diversity} acts between groups of beams: set decode.beam_groups")
        if self.coverage_penalty and not self.ended_first:
            raise UserError(
                "decode.coverage_penalty ranks outputs that have ended, and decode.ended_first=False ranks others with "
                "them: set it to True"
            )

    def _check_probabilities(self) -> None:
        if not COLDEST <= self.temperature < math.inf:
            raise UserError(
                f"decode.temperature={self.temperature} must be at least {COLDEST:g} and finite; decode.top_k=1 takes "
                "the likeliest"
            )
        for key in ("top_p", "typical"):
            if not 0 < getattr(self, key) <= 1:
                raise UserError(f"decode.{key}={getattr(self, key)} must be above 0 and at most 1 (1 = off)")
        for key in ("min_p", "epsilon"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError(f"decode.{key}={getattr(self, key)} must be at least 0 (off) and below 1")
        if self.seed >= 2**32:
            raise UserError(f"decode.seed={self.seed} must be below {2**32}")

    def _check_search(self, searched: bool) -> None:
        unread, readers = (SAMPLE_ONLY, "sample' or 'mbr") if self.search == "beam" else (BEAM_ONLY, "beam")
        for key in () if is_own(self.search) else unread:
            if getattr(self, key) != DEFAULTS[key] and key not in PRESET:
                raise UserError(f"decode.{key}={getattr(self, key)} is read by decode.search='{readers}' only")
        if self.beam_size % self.beam_groups:
            raise UserError(f"decode.beam_groups={self.beam_groups} must divide decode.beam_size={self.beam_size}")
        if self.rerank and self.search == "mbr":
            raise UserError(f"decode.rerank={self.rerank!r} with decode.search='mbr', which ranks by itself")
        key, most = ("beam_size", self.beam_size) if self.search == "beam" else ("samples", self.samples)
        if (self.rerank or self.search == "mbr") and most < 2:
            asked = f"decode.rerank={self.rerank!r} with " if self.rerank else ""
            raise UserError(
                f"{asked}decode.search={self.search!r} has one candidate to choose from: raise decode.{key}"
            )
        if self.search == "sample" and self.n_best > 1 and not self.rerank:
            raise UserError(f"decode.n_best={self.n_best}: decode.search='sample' has decode.samples outputs: set that")
        if searched and self.search in SEARCHES and self.n_best > most:
            raise UserError(
                f"decode.n_best={self.n_best} is more than decode.{key}={most}: lower it or raise the other"
            )
        if self.max_length and self.min_length > self.max_length:
            raise UserError(f"decode.min_length={self.min_length} is more than decode.max_length={self.max_length}")

    def _check_outputs(self) -> None:
        if self.outputs in ("text", "conll"):
            for key, asked in (("scores", self.scores), ("alignments", self.alignments)):
                if asked:
                    raise UserError(
                        f"decode.{key}=True has no place in decode.outputs={self.outputs!r}: use tsv or jsonl"
                    )
        if self.overlong == "split" and self.returned > 1:
            raise UserError(f"decode.overlong='split' joins one output of each piece, not {self.returned}: use 'cut'")


DEFAULTS = {field.name: field.default for field in dataclasses.fields(DecodeConfig)}


class DecodeOptions(TypedDict, total=False):
    """The fields of DecodeConfig as keyword arguments, all optional."""

    search: str
    beam_size: int
    length_penalty: float
    length_offset: float
    coverage_penalty: float
    beam_groups: int
    diversity: float
    patience: float
    ended_first: bool
    n_best: int
    samples: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    epsilon: float
    typical: float
    seed: int
    mbr_utility: str
    rerank: str
    min_length: int
    max_length: int
    max_extra_length: int
    no_repeat_ngram: int
    repetition_penalty: float
    forced_start: bool
    forced_end: bool
    renormalize: bool
    forbid: Sequence[str]
    only: Sequence[str]
    max_answer_length: int
    no_answer_threshold: float
    pooling: str
    normalize: bool
    ensemble: Sequence[str]
    ensemble_average: str
    source_language: str
    target_language: str
    inputs: str
    outputs: str
    scores: bool
    alignments: bool
    overlong: str
    batch_size: int
    dtype: str
