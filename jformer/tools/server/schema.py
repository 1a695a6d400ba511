"""The bodies of requests and of error responses; /openapi.json is generated from these classes."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """A JSON object that allows no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


Adapter = Annotated[str | None, Field(description="which of --adapters answers; null is the run itself")]


Language = Annotated[str, Field(description="for a multilingual model; empty = as the server was started")]


class Asked(Body):
    """One text to answer, and constraints on its answer."""

    source: str
    prefix: Annotated[str, Field(description="the beginning of the answer")] = ""
    constraints: Annotated[
        list[str], Field(description="phrases that the answer must contain; needs a beam of 2 or more")
    ] = []
    source_language: Language = ""
    target_language: Language = ""


class InContext(Body):
    """A question, and the context that contains its answer."""

    question: str
    context: str


class InputsBody(Body):
    """Texts to answer."""

    adapter: Adapter = None
    inputs: Annotated[
        list[str | Asked | InContext], Field(min_length=1, description="texts, or objects with further fields")
    ]
    stream: Annotated[bool, Field(description="send answers while they grow, as server-sent events")] = False


class PairToScore(Body):
    """A target to score."""

    source: Annotated[str, Field(description="empty for a language model")] = ""
    target: str
    source_language: Language = ""
    target_language: Language = ""


class PairsBody(Body):
    """Targets to score."""

    adapter: Adapter = None
    pairs: Annotated[list[PairToScore], Field(min_length=1)]


class WatchedBody(Body):
    """A source and a target to look into; a null target stands for the model's own answer."""

    adapter: Adapter = None
    source: str
    target: str | None = None


class Mistake(BaseModel):
    """An error response."""

    detail: Annotated[str, Field(description="the reason, in one line")]
