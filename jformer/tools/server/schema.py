"""What clients send, checked, and what they are told of mistakes; /openapi.json is made of it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """An object without other fields than its own."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Asked(Body):
    """One text to answer, and what its answer must hold."""

    source: str
    prefix: Annotated[str, Field(description="what the answer begins with")] = ""
    constraints: Annotated[list[str], Field(description="phrases in the answer; they need a beam of 2 or more")] = []


class InContext(Body):
    """A question, and the context whose words answer it."""

    question: str
    context: str


class Inputs(Body):
    """Texts to answer."""

    inputs: Annotated[list[str | Asked | InContext], Field(min_length=1, description="texts, or objects that say more")]
    stream: Annotated[bool, Field(description="send answers while they grow, as server-sent events")] = False


class Pair(Body):
    """A target to score."""

    source: Annotated[str, Field(description="nothing for a language model")] = ""
    target: str


class Pairs(Body):
    """Targets to score."""

    pairs: Annotated[list[Pair], Field(min_length=1)]


class Watched(Body):
    """A source to look into, and a target, or null for the model's own answer."""

    source: str
    target: str | None = None


class Mistake(BaseModel):
    """Why a request has no answer."""

    detail: Annotated[str, Field(description="a line")]
