"""What the donor's names become in the new package."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pilotage.arch.scaffold.code import Imports
from pilotage.arch.scaffold.donor import Donor


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a new package.

    Attributes:
        name: its directory, e.g. "qwen3x".
        package: its dotted name: "pilotage.models.qwen3x" in the tree, "qwen3x" outside it.
        architecture: the class it serves, as in config.json.
        donor: the package it is copied from.
        modeling: file name of the modelling source that it follows, or None where transformers has none.
    """

    name: str
    package: str
    architecture: str
    donor: Donor
    modeling: str | None = None

    @property
    def prefix(self) -> str:
        """What its class names start with."""
        return re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", self.architecture)

    @property
    def config_class(self) -> str:
        return f"{self.prefix}Config"

    @property
    def model_class(self) -> str:
        """The class given to vLLM: named like the architecture that it is registered for."""
        return self.architecture

    def rename(self, text: str) -> str:
        """Replace the donor's class and package names in source text; comments say what the diff says, and stay."""
        renamed = {f"pilotage.models.{self.donor.name}": self.package, self.donor.config_class: self.config_class}
        for module in self.donor.files.values():
            for name in module.classes():
                if name.startswith(self.donor.prefix) and name != self.donor.config_class:
                    renamed[name] = self.prefix + name.removeprefix(self.donor.prefix)
        for role in ("Attention", "MLP", "DecoderLayer", "Model"):
            renamed.setdefault(f"{self.donor.prefix}{role}", f"{self.prefix}{role}")
        renamed.setdefault(f"{self.donor.prefix}Config", f"{self.prefix}Config")
        renamed[self.donor.architecture] = self.architecture
        pattern = re.compile(r"\b(" + "|".join(re.escape(n) for n in sorted(renamed, key=len, reverse=True)) + r")\b")
        # The donor's name in sentences: "a Llama checkpoint", "Gemma 3 text config".
        letters = re.match(r"[A-Za-z]+", self.donor.prefix)
        prose = re.compile(rf"\b{letters[0]}( ?\d+(\.\d+)?)?\b(?!\w)" if letters else r"(?!)")
        return "\n".join(
            line
            if line.lstrip().startswith("#")
            else prose.sub(self.prefix, pattern.sub(lambda match: renamed[match[1]], line))
            for line in text.split("\n")
        )

    def renamed_imports(self, imports: Imports) -> str:
        """The import block under the new names, sorted again."""
        imports.plain = {self.rename(name) for name in imports.plain}
        imports.names = {self.rename(m): {self.rename(n) for n in names} for m, names in imports.names.items()}
        return imports.text()
