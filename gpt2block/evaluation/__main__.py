"""`python -m gpt2block.evaluation`: the command `lm_eval`, which then knows the type `gpt2block`.

lm_eval 0.4.13 does not look for model types of other packages. Later versions find the type by the
entry point in the group "lm_eval.models"; their command `lm_eval` needs no other module.
"""

from __future__ import annotations

import sys

from gpt2block.errors import PrintableError, require

NAME, TARGET = "gpt2block", "gpt2block.evaluation.language_model:EvaluatedModel"


def register() -> None:
    """Register the model type in lm_eval, unless lm_eval knows it. Raises InputError."""
    require("an evaluation", "eval", "lm_eval")
    import lm_eval.models  # noqa: F401, PLC0415  (registers lm_eval's own types)
    from lm_eval.api.registry import model_registry  # noqa: PLC0415

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def main() -> None:
    """Run `lm_eval` with the arguments of the command line."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate  # noqa: PLC0415

        cli_evaluate()
    except PrintableError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
