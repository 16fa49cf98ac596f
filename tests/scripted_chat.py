"""A chat with a model that follows a script."""

from pathlib import Path

from fake_model import FakeSession, replies, tokenizer_metadata
from m3_runtime.chat import ChatFormat, Conversation
from m3_runtime.generate import Generator
from m3_runtime.held_tokens import Shift
from m3_runtime.sampler import Sampler, SamplerOptions
from m3_runtime.template import ChatTemplate
from m3_runtime.text import ChatTokenizer
from make_checkpoint import CheckpointSpec, make_tokenizer

SPEC = CheckpointSpec()
TOKENIZER = ChatTokenizer(tokenizer_metadata(make_tokenizer(SPEC), SPEC.vocab))
TEMPLATE = ChatTemplate((Path(__file__).resolve().parent / "chat_template.jinja").read_text(encoding="utf-8"))
END = "[e~["


class Chat:
    """A conversation with a scripted model."""

    def __init__(
        self,
        *answers: str,
        context: int = 1 << 20,
        thinking: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        template: ChatTemplate = TEMPLATE,
        shift: Shift | None = None,
        keep: int = 0,
    ) -> None:
        self.session = FakeSession(SPEC.vocab, replies(*map(TOKENIZER.encode, answers)), context)
        sampler = Sampler(SamplerOptions(temperature=0), 0)
        self.format = ChatFormat(template, TOKENIZER, thinking)
        self.generator = Generator(self.session, context, TOKENIZER, sampler, shift=shift)
        self.conversation = Conversation(self.format, self.generator, system=system, max_tokens=max_tokens, keep=keep)

    def ask(self, text: str) -> str:
        list(self.conversation.ask(text))
        return self.conversation.answer.reply.text

    @property
    def held(self) -> str:
        return TOKENIZER.decode(self.session.held, control=True)
