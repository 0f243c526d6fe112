"""What the pages of public names show beyond what a docstring says: examples as code, and the settings as arguments."""

import re
from typing import Any

import griffe


class ReadableNames(griffe.Extension):
    """Examples become code, and `**options: Unpack[Options]` the settings that may stand there."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Have a docstring's example read as code: the parser knows the section by its plural only."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show settings among the arguments of a class that takes them."""
        init = cls.members.get("__init__")
        if isinstance(init, griffe.Function):
            _spell_out_settings(init, cls)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Show settings among the arguments of a function that takes them."""
        _spell_out_settings(func, func)


def _spell_out_settings(function: griffe.Function, documented: griffe.Object) -> None:
    taken = [each for each in function.parameters if str(each.annotation) in ("Unpack[Options]", "Unpack[Budgets]")]
    if not taken or documented.docstring is None:
        return
    (options,) = taken
    module = function.modules_collection["gemini.settings"]
    settings, fields = module.members["Settings"], module.members["SettingFields"]
    names = list(module.members[str(options.annotation)[len("Unpack[") : -1]].members)
    said, before = _arguments(settings.docstring.value), _arguments(documented.docstring.value)
    if options.name not in before:
        return
    del function.parameters[options.name]
    for name in names:
        field = fields.members[name]
        keyword = griffe.ParameterKind.keyword_only
        function.parameters.add(griffe.Parameter(name, annotation=field.annotation, default=field.value, kind=keyword))
    paragraphs = "\n".join(said[name] for name in names)
    documented.docstring.value = documented.docstring.value.replace(before[options.name], paragraphs)


def _arguments(docstring: str) -> dict[str, str]:
    """The paragraphs of a docstring's Args by their names."""
    if "\nArgs:\n" not in docstring:
        return {}
    section = docstring.split("\nArgs:\n")[1].split("\n\n")[0]
    found = re.split(r"^    (?=\w+:)", section, flags=re.MULTILINE)[1:]
    return {each.split(":")[0]: "    " + each.rstrip("\n") for each in found}
