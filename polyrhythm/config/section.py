"""What all sections of a configuration are."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from polyrhythm.errors import UserError

if TYPE_CHECKING:  # editors complete the keys, as of any dataclass
    from pydantic._internal._model_construction import ModelMetaclass as Explained
else:

    class Explained(type(BaseModel)):
        """Whoever makes a configuration, from a file or in a script, hears of a mistake in one line that has the fix."""

        def __call__(cls, *arguments: Any, **values: Any) -> Any:
            try:
                return super().__call__(*arguments, **values)
            except ValidationError as error:
                from polyrhythm.config.mistakes import explain  # which knows the sections

                raise UserError("\n".join(explain(mistake) for mistake in error.errors())) from None


class Section(BaseModel, metaclass=Explained):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
