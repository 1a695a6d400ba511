"""One ModelConfig for all model families. Plain dataclasses: importing this room's options needs no jax."""

import dataclasses

from jformer.errors import UserError, check_choice, check_least, check_range
from jformer.models.head_config import HeadConfig
from jformer.models.lora_config import LoraConfig
from jformer.models.mup_config import MupConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.models.vision_config import VisionConfig
from jformer.plugins import check_part, is_own

CHOICES = {
    "family": ("encdec", "encoder", "decoder", "vit"),
    "norm": ("post", "pre", "sandwich", "deepnorm", "none"),
    "norm_type": ("layernorm", "rmsnorm"),
    "attention_scale": ("sqrt", "one", "off"),
    "positions": ("sinusoidal", "learned", "relative", "rotary", "alibi", "transformer_xl", "none"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu", "glu", "reglu", "geglu", "geglu_tanh", "swiglu"),
    "embedding_scale": ("input", "output", "positions", "none"),
    "init": ("glorot", "he", "small", "bert", "gpt2", "t5", "vit"),
    "parametrization": ("standard", "mup"),
    "dtype": ("float32", "bfloat16", "auto"),
    "precision": ("default", "high", "highest"),
}
OPEN = ("norm_type", "positions", "activation")  # keys of CHOICES that may name a user-defined part
LAYERS = {"attention": ("multi_head",), "feed_forward": ("projections",)}  # the same, of one built-in choice each
REMAT = ("none", "dots", "full")
KERNELS = ("auto", "own", "cudnn", "splash", "rows")
ROWS = ("auto", "one_text", "several")


@dataclasses.dataclass(frozen=True)
class RelativeConfig:
    """Relative position buckets (Raffel et al. 2020, section 2.1); positions='relative' only."""

    num_buckets: int = 32  # of distances; each has a learned bias for each head, added to the scores (section 2.1)
    max_distance: int = 128  # distances from here on share the last bucket (section 2.1)


@dataclasses.dataclass(frozen=True)
class ExecutionConfig:
    """How the blocks run; what they compute stays the same."""

    # Blocks per step of their loop; 0 = all on CPUs and, without remat, of up to 24 on GPUs and 6 on TPUs, else 1
    unroll: int = 0
    remat: str = "none"  # recomputed for gradients (Chen et al. 2016): none | dots (all but projections) | full
    # auto: a fused one where its limits hold, else our own | own | cudnn, splash, rows: that one, or no training
    attention_kernel: str = "auto"
    # of batches: auto: as data.batching makes them, several in code of your own | one_text, from the first position, so
    # that cuDNN's attention needs no mask | several
    rows: str = "auto"
    # Queries that attend at once, where no fused kernel does (Rabe and Staats 2021); 0 = up to 128 on TPUs, elsewhere
    # all, or 512 of rows over 2,048 x 2,048
    attention_chunk: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and choices of a Transformer; the defaults are the base model of Vaswani et al. 2017, Table 3."""

    family: str = "encdec"  # encdec | encoder | decoder | vit: which stacks there are, and their inputs
    vocab_size: int = 0  # rows of the (source) embedding; 0 = the tokenizer's; more pads it, for even shards
    target_vocab_size: int = 0  # encdec: the same for the target side; with a shared embedding both are one
    num_layers: int = 6  # N (section 3.1); of the encoder where there are two stacks
    num_decoder_layers: int = 0  # encdec: N of the decoder (section 3.1); 0 = num_layers
    shared_layers: bool = False  # one layer of a stack is used N times (Universal: Dehghani et al. 2019; ALBERT)
    d_model: int = 512  # features of a position, in and out of every sublayer (section 3.1); wider costs more
    d_ff: int = 2048  # features between the two projections of the feed-forward (section 3.3): the paper's 4 d_model
    num_heads: int = 8  # attentions side by side, each of d_model / num_heads features (section 3.2.2)
    num_kv_heads: int = 0  # of keys and values, each for a group of query heads (Ainslie et al. 2023); 0 = num_heads
    d_k: int = 0  # query and key size of one head (section 3.2.2); 0 = d_model / num_heads
    d_v: int = 0  # value size of one head (section 3.2.2); 0 = d_model / num_heads
    norm: str = "post"  # post | pre | sandwich | deepnorm | none: see transformer.Block
    norm_type: str = "layernorm"  # layernorm (Ba et al. 2016) | rmsnorm (Zhang and Sennrich 2019)
    norm_epsilon: float = 1e-6  # added to the variance before its square root; published models differ in it
    residual: bool = True  # False, for ablations: sublayers replace their input, not add to it (He et al. 2016)
    attention: str = "multi_head"  # or package.module:Class (docs/parts.md), in place of models.Attention
    feed_forward: str = "projections"  # or package.module:Class, in place of models.FeedForward
    attention_scale: str = "sqrt"  # sqrt: 1/sqrt(k) (section 3.2.1) | one: in the initial queries (T5) | off: ablation
    window: int = 0  # self-attention: only keys at a distance below it (Beltagy et al. 2020, section 3.1); 0 = all keys
    positions: str = "sinusoidal"  # sinusoidal | learned | relative | rotary | alibi | transformer_xl | none
    max_length: int = 512  # rows of learned positions (Gehring et al. 2017); of others what exports state
    activation: str = "relu"  # relu | gelu | gelu_tanh | silu, or gated: glu | reglu | geglu | geglu_tanh | swiglu
    bias: bool = True  # of projections and layer norms
    dropout: float = 0.1  # on every sublayer's output and on the embedded input (section 5.4)
    attention_dropout: float = 0.0  # on attention weights; of the fused kernels, TPUs' for rows supports it
    activation_dropout: float = 0.0  # between the two projections of the feed-forward
    embedding_dropout: bool = True  # False: no `dropout` on the embedded input
    output_dropout: bool = False  # `dropout` also applies to the output of a stack (T5: Raffel et al. 2020)
    embedding_scale: str = "input"  # times sqrt(d_model): input (section 3.4) | over it: output (T5), positions | none
    embedding_norm: bool = False  # a norm over the embedded input (BERT: Devlin et al. 2019; BART: Lewis et al. 2020)
    shared_embedding: bool = True  # encdec: source and target read one table; needs one shared vocabulary (section 3.4)
    tied_output: bool = True  # the projection to logits is the (target) table, transposed (Press and Wolf 2017)
    init: str = "glorot"  # glorot | he | small | bert | gpt2 | t5 | vit: see initializers
    parametrization: str = "standard"  # standard | mup: the best rate stays as d_model grows (Yang et al. 2022)
    # Of activations; parameters and sums of the loss are always float32. auto: the faster one on the devices
    dtype: str = "float32"
    # Of float32 products: default (TF32 on GPUs, one bfloat16 pass on TPUs) | high (TF32, three passes) | highest (all)
    precision: str = "default"
    relative: RelativeConfig = RelativeConfig()
    vision: VisionConfig = VisionConfig()
    head: HeadConfig = HeadConfig()
    recurrent: RecurrentConfig = RecurrentConfig()
    mup: MupConfig = MupConfig()
    lora: LoraConfig = LoraConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @property
    def decoder_layers(self) -> int:
        """N of the stack that generates."""
        return self.num_decoder_layers or self.num_layers

    @property
    def kv_heads(self) -> int:
        """g: heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def key_size(self) -> int:
        """k: query and key size of one head."""
        return self.d_k or self.d_model // self.num_heads

    @property
    def value_size(self) -> int:
        """u: value size of one head."""
        return self.d_v or self.d_model // self.num_heads

    @property
    def scale_width(self) -> int:
        """The d_model that embedding scales follow: with mup the base's."""
        return self.mup.base_width if self.parametrization == "mup" else self.d_model

    @property
    def mup_width_ratio(self) -> float:
        """The width relative to mup's base model; 1 with the standard parametrization."""
        return self.d_model / self.scale_width

    @property
    def query_scale(self) -> float:
        """The factor of q·k: 1/sqrt(k), or with mup 1/k, scaled so that both agree at the base's head size."""
        if self.attention_scale != "sqrt":
            return 1.0
        heads = self.mup.base_heads or self.num_heads
        base = self.key_size if self.parametrization == "standard" or self.d_k else self.mup.base_width // heads
        return base**0.5 / self.key_size

    @property
    def embedding_size(self) -> int:
        """e: features of an embedded token."""
        return self.recurrent.embedding_size or self.d_model

    @property
    def readout_size(self) -> int:
        """r: features of a recurrent decoder's output."""
        return self.recurrent.readout_size or self.d_model

    @property
    def output_size(self) -> int:
        """Features of the vector that a recurrent model projects to the vocabulary."""
        if self.family == "encdec":
            return self.d_model if self.recurrent.attention == "none" else self.readout_size
        return self.d_model * (2 if self.recurrent.bidirectional else 1)

    @property
    def merged(self) -> "ModelConfig":
        """The config of the same model with its adapters merged into the kernels."""
        return dataclasses.replace(self, lora=LoraConfig())

    @property
    def decodes(self) -> bool:
        """Whether the model writes tokens one after another, with a cache."""
        return self.family in ("encdec", "decoder") and not self.head.vectors

    @property
    def pooled(self) -> bool:
        """Whether a classifier reads one vector of a text, or the vector is the answer."""
        return bool(self.head.num_classes or self.head.vectors) and self.head.pooling != "none"

    @property
    def needs_whole_rows(self) -> str:
        """The option that keeps devices from sharing the positions of a row, or ''."""
        parts = {key: getattr(self, key) for key in (*LAYERS, *OPEN)}
        options = {key: value for key, value in parts.items() if is_own(value) or value == "transformer_xl"} | {
            "recurrent.cell": self.recurrent.cell,
            "vision.source": self.vision.source,
            "head.num_classes": self.head.num_classes,
            "head.vectors": self.head.vectors,
        }
        return next((f"model.{key}={value!r}" for key, value in options.items() if value), "")

    @property
    def reads_images(self) -> bool:
        """Whether the encoder reads images instead of text."""
        return self.family == "vit" or self.vision.source

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.vision.image_size // self.vision.patch_size) ** 2

    def with_vocabulary(self, source: int, target: int) -> "ModelConfig":
        """Return the config with the sizes of the vocabularies filled in; raise UserError if it sets too few rows."""
        for key, needed in (("vocab_size", source), ("target_vocab_size", target)):
            if 0 < getattr(self, key) < needed:
                raise UserError(
                    f"model.{key}={getattr(self, key)} is less than the tokenizer's {needed}: use 0 for its size"
                )
        rows = self.vocab_size or source
        target_rows = rows if self.shared_embedding else self.target_vocab_size or target
        return dataclasses.replace(self, vocab_size=rows, target_vocab_size=target_rows)

    def with_classes(self, count: int, each: bool = False) -> "ModelConfig":
        """Return the config of a classifier of texts or, with `each`, of every position without pooling.

        Raises UserError if it was set to another number of classes.
        """
        if self.head.num_classes not in (0, count):
            raise UserError(
                f"model.head.num_classes={self.head.num_classes} but the training text has {count} labels: use 0"
            )
        head = dataclasses.replace(self.head, pooling="none", pooler=False) if each else self.head
        return dataclasses.replace(self, head=dataclasses.replace(head, num_classes=count))

    def with_vectors(self, pooling: str = "") -> "ModelConfig":
        """Return the config of a model without a head, which pools as this one, or in another way without a pooler."""
        head = dataclasses.replace(self.head, vectors=True, num_classes=0, crf=False, bias=False, transform=False)
        head = dataclasses.replace(head, pooling=pooling, pooler=False) if pooling else head
        return dataclasses.replace(self, head=head)

    def check(self) -> None:
        """Raise UserError for the first field that no model can be built from."""
        for field in dataclasses.fields(self):
            section, given = type(field.default), getattr(self, field.name)
            if dataclasses.is_dataclass(section) and not isinstance(given, section):
                kind = f"{section.__module__}.{section.__name__}"
                raise UserError(f"model.{field.name}: give a {kind}, not a {type(given).__name__}")
        for key, choices in {**CHOICES, **LAYERS}.items():
            allow = check_choice if key in CHOICES and key not in OPEN else check_part
            allow(f"model.{key}", getattr(self, key), choices)
        check_choice("model.execution.remat", self.execution.remat, REMAT)
        check_choice("model.execution.attention_kernel", self.execution.attention_kernel, KERNELS)
        check_choice("model.execution.rows", self.execution.rows, ROWS)
        check_least("model.execution", self.execution, ("unroll", "attention_chunk"), 0)
        self.head.check(self.family)
        self.lora.check(self)
        self.recurrent.check(self)
        self.mup.check(self)
        self._check_numbers()
        self._check_shapes()
        self._check_family()
        if self.norm == "deepnorm" and not self.residual:
            raise UserError("model.norm='deepnorm' scales residuals: it needs model.residual=True")

    def _check_numbers(self) -> None:
        check_least("model.relative", self.relative, ("num_buckets", "max_distance"), 1)
        check_least("model", self, ("num_layers", "d_model", "d_ff", "num_heads", "max_length"), 1)
        zeros = ("vocab_size", "target_vocab_size", "num_decoder_layers", "num_kv_heads", "d_k", "d_v", "window")
        check_least("model", self, zeros, 0)
        rates = ("dropout", "attention_dropout", "activation_dropout")
        check_range("model", self, rates, 0, 1 - 2**-17)  # rounded to 16 bits, it keeps something
        if not 0 < self.norm_epsilon < 1:
            raise UserError(f"model.norm_epsilon={self.norm_epsilon} must be above 0 and below 1")

    def _check_shapes(self) -> None:
        if self.recurrent.cell:
            return
        if not (self.d_k and self.d_v) and self.d_model % self.num_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} must divide model.d_model={self.d_model}, or set d_k and d_v"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(f"model.num_kv_heads={self.num_kv_heads} must divide model.num_heads={self.num_heads}")
        if self.positions in ("sinusoidal", "transformer_xl") and self.d_model % 2:
            raise UserError(f"model.d_model={self.d_model} must be even: {self.positions} positions pair its features")
        if self.positions == "rotary" and self.key_size % 2:
            raise UserError(f"model.d_k={self.key_size} must be even: rotary positions rotate pairs of features")
        buckets = self.relative.num_buckets
        if self.positions == "relative" and (buckets < 4 or buckets % 4 or self.relative.max_distance <= buckets // 2):
            raise UserError(
                f"model.relative.num_buckets={buckets} must be a multiple of 4 and less than twice "
                f"model.relative.max_distance={self.relative.max_distance}"
            )

    def _check_family(self) -> None:
        if self.family != "encdec" and self.num_decoder_layers:
            raise UserError(f"model.num_decoder_layers={self.num_decoder_layers} is read by family='encdec' only")
        if self.family != "encdec" and not self.shared_embedding:
            raise UserError("model.shared_embedding=False is read by family='encdec' only: others have one vocabulary")
        if self.embedding_scale == "output" and not self.tied_output:
            raise UserError("model.embedding_scale='output' scales tied logits: it needs model.tied_output=True")
        self.vision.check(self)
        if self.family == "encdec" and self.shared_embedding and self.target_vocab_size not in (0, self.vocab_size):
            raise UserError(
                f"model.target_vocab_size={self.target_vocab_size} differs from model.vocab_size={self.vocab_size}: "
                "set model.shared_embedding=False or leave it 0"
            )
