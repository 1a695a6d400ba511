"""Convert generation_config.json to our decoding options and back; settings without a counterpart are reported."""

from collections.abc import Mapping, Sequence
from typing import Any

from jformer.data.tokenizers.symbols import Symbols
from jformer.decoding.decode_config import DecodeConfig
from jformer.tools.hf.families import Fields

LIMIT = 20  # their default max_new_tokens; a max_length would count the first token as well
UNLIKE = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
          "num_beam_groups": 1, "penalty_alpha": 0.0, "typical_p": 1.0, "suppress_tokens": [],
          "begin_suppress_tokens": [], "exponential_decay_length_penalty": [], "sequence_bias": {},
          "force_words_ids": [], "guidance_scale": 1.0, "remove_invalid_values": False,
          "num_return_sequences": 1}  # fmt: skip
# Settings that are read, and their values where a file has none.
USUAL = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False, "max_length": LIMIT, "max_new_tokens": None,
         "min_length": 0, "min_new_tokens": None, "no_repeat_ngram_size": 0, "renormalize_logits": False,
         "bad_words_ids": None, "do_sample": False, "forced_bos_token_id": None,
         "forced_eos_token_id": None}  # fmt: skip
READ = (*USUAL, "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff")  # without do_sample, inert
INERT = ("_from_model_config", "transformers_version", "use_cache", "cache_implementation", "cache_config",
         "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
         "disable_compile", "compile_config", "low_memory",
         "diversity_penalty")  # of no output; UNLIKE has the groups  # fmt: skip
OURS_ALONE = ("coverage_penalty", "beam_groups", "repetition_penalty", "only", "ensemble",
              "rerank")  # theirs lacks or has others  # fmt: skip


def read(
    fields: Fields,
    own: Fields,
    symbols: Symbols,
    tokens: Sequence[str],
    language: bool = False,
    continues: bool = False,
) -> tuple[DecodeConfig, list[str]]:
    """Return our options for a generation_config.json, and notes on what has no option here.

    Their lengths count the first token and the language; ours do not.

    Args:
        fields: of config.json, where older models have these settings; as in transformers 5, only the end is read if
            there is a generation_config.json.
        own: of generation_config.json; {} = there is none.
        symbols: of the target.
        tokens: the token of each id.
        language: whether texts begin with a language token, which then starts outputs whatever the settings say.
        continues: whether outputs continue a prompt, which theirs includes in max_length and min_length.
    """
    own = {key: value for key, value in own.items() if value is not None}
    fields = {key: value for key, value in fields.items() if value is not None}
    notes = []
    if own:
        notes = [f"{key}={fields[key]!r} of config.json" for key, off in {**USUAL, **UNLIKE}.items()
                 if fields.get(key) not in (None, [], {}, off, own.get(key))]  # fmt: skip
        fields = {"eos_token_id": fields.get("eos_token_id", []), **own}
    forced = language or "forced_bos_token_id" in fields or bool(fields.get("force_bos_token_to_be_generated"))
    before = len(symbols.before) if forced else 0
    beams, penalty = fields.get("num_beams", 1), float(fields.get("length_penalty", 1.0))
    notes += [
        f"{key}={fields[key]!r}" for key, off in UNLIKE.items() if fields.get(key, off) not in (off, None, [], {})
    ]
    known = (*READ, *UNLIKE, *INERT, *(() if fields.get("do_sample") else SAMPLING))
    notes += [f"{key}={value!r}" for key, value in own.items() if value and key not in known]
    for whole, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if continues and fields.get(whole) and new not in fields:
            notes.append(f"{whole}={fields[whole]} counts the prompt there, and new tokens alone here")
    if penalty < 0:
        notes.append(f"length_penalty={penalty}")
    most = fields.get("max_new_tokens", fields["max_length"] - 1 if "max_length" in fields else LIMIT) - before
    options: dict[str, Any] = {
        "beam_size": beams,
        "length_penalty": max(penalty, 0.0) if beams > 1 else 0.0,
        "length_offset": float(before),
        "patience": 1.0 if fields.get("early_stopping") is True and beams > 1 else 0.0,
        "ended_first": beams == 1,
        "min_length": max(0, fields.get("min_new_tokens", fields.get("min_length", 1) - 1) - before),
        "max_length": max(1, most),
        "max_extra_length": max(1, most),
        "forced_start": forced or not symbols.before,
        "no_repeat_ngram": fields.get("no_repeat_ngram_size", 0),
        "forced_end": fields.get("forced_eos_token_id") in (symbols.eos, [symbols.eos]),
        "renormalize": bool(fields.get("renormalize_logits")),
    }
    for key, known in (("eos_token_id", (symbols.eos,)), ("forced_eos_token_id", (symbols.eos,)),
                       ("forced_bos_token_id", symbols.before[:1])):  # fmt: skip
        ids = fields.get(key, [])
        if not {*(ids if isinstance(ids, list) else [ids])} <= {*known}:
            notes.append(f"{key}={ids}")
    bad = fields.get("bad_words_ids", [])
    barred = (symbols.pad, symbols.bos, symbols.eos)  # theirs never forbids the end either
    options["forbid"] = tuple(tokens[ids[0]] for ids in bad if len(ids) == 1 and ids[0] not in barred)
    notes += [f"bad_words_ids with {ids}" for ids in bad if len(ids) != 1]
    if fields.get("do_sample"):
        notes += ["do_sample=True: set decode.search='sample'"]
    return DecodeConfig(**options), notes


def write(
    options: DecodeConfig, symbols: Symbols, ids: Mapping[str, int], longest: int = 0, places: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """Return the generation_config.json of a run, and notes on options without a counterpart.

    Args:
        options: of the run.
        symbols: of the target.
        ids: the id of each token.
        longest: the most tokens of a source, which outputs may exceed by max_extra_length; 0 = there is none.
        places: the most positions of an output; 0 = any number.
    """
    before, default = len(symbols.before) if options.forced_start else 0, DecodeConfig()
    notes = [f"decode.{key}={getattr(options, key)!r}" for key in OURS_ALONE
             if getattr(options, key) != getattr(default, key)]  # fmt: skip
    if options.search != "beam":
        notes.append(f"decode.search={options.search!r}")
    elif options.beam_size > 1:
        if options.length_penalty and options.length_offset != before:
            notes.append(f"decode.length_offset={options.length_offset}, theirs is {before}")
        if options.ended_first:
            notes.append("decode.ended_first=True")
        if options.patience not in (0.0, 1.0):
            notes.append(f"decode.patience={options.patience}")
    most = options.max_extra_length + longest
    most = min(most, options.max_length or most)
    if options.max_extra_length < most:
        notes.append(f"decode.max_extra_length={options.max_extra_length}")
    never = {ids[word] for word in options.forbid} | ({symbols.pad, symbols.bos} & {*ids.values()})
    fields: dict[str, Any] = {
        "num_beams": options.beam_size,
        "early_stopping": True if options.patience else "never" if options.beam_size > 1 else False,
        "length_penalty": options.length_penalty if options.beam_size > 1 else None,
        "max_new_tokens": min(most + before, places or most + before),
        "no_repeat_ngram_size": options.no_repeat_ngram,
        "min_new_tokens": options.min_length + before if options.min_length else None,
        "bad_words_ids": [[i] for i in sorted(never - {symbols.eos})] or None,
        "forced_bos_token_id": symbols.before[0] if before else None,
        "forced_eos_token_id": symbols.eos if options.forced_end else None,
        "renormalize_logits": options.renormalize or None,
    }
    return {key: value for key, value in fields.items() if value is not None}, notes
