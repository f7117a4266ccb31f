"""PTX as data: functions, their registers and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"\.(?P<kind>entry|func)\s+(?:\((?P<returned>[^)]*)\)\s*)?(?P<name>\w+)\s*\((?P<params>[^)]*)\)")
_VARIABLE = re.compile(
    r"\.(?P<space>shared|local|param|global|const)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)"
    r"(?:\[(?P<count>\d*)\])?"
)
_REGISTERS = re.compile(r"(?P<name>%?\w+)(?:<(?P<count>\d+)>)?")
_LABEL = re.compile(r"([$\w]+):")
#: Operands are what commas outside of braces and brackets separate.
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*")
#: Directives that change nothing here.
_IGNORED = re.compile(r"\.(pragma|loc|file)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction; `modifiers` are the parts of its name behind the first."""

    text: str
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str = ""  #: the register that must be true, "" if none
    negated: bool = False  #: it must be false instead
    known: int = 0  #: how many modifiers a table's name for it has

    @property
    def others(self) -> tuple[str, ...]:
        """The modifiers between the table's name and the type."""
        return self.modifiers[self.known : -1]

    @property
    def type(self) -> str:
        """The type that the name ends with, such as "u32"."""
        return self.modifiers[-1]


@dataclass(frozen=True)
class Variable:
    """Memory with a name."""

    name: str
    space: str
    size: int  #: in bytes; 0 for memory whose size the launch decides
    align: int


@dataclass
class Function:
    """A kernel or a function that it calls. `labels`: the number of the instruction behind each."""

    name: str
    params: list[Variable]
    returned: list[Variable]
    registers: dict[str, str] = field(default_factory=dict)  #: name -> type
    variables: dict[str, Variable] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass
class Program:
    """A translation unit."""

    functions: dict[str, Function]
    variables: dict[str, Variable]  #: outside of functions


def size_of(type_name: str) -> int:
    """Bytes of a type: 4 for "f32"."""
    return int(re.sub(r"\D", "", type_name)) // 8


def parse(text: str) -> Program:
    """The program of a PTX file; ValueError for what this parser does not know."""
    text = _COMMENT.sub("", text)
    program, at = Program({}, {}), 0
    while match := re.compile(r"[;{]").search(text, at):
        head = text[at : match.start()]
        found = _FUNCTION.search(head)
        if found is None:
            _declare(head, program.variables)
            at = text.index(";", match.start()) + 1  # behind the values of an array, too
        elif match.group() == ";":  # a declaration
            at = match.end()
        else:
            end = _closing_brace(text, match.start())
            params, returned = (_variables(found[which] or "") for which in ("params", "returned"))
            function = Function(found["name"], params, returned)
            _parse_body(text[match.end() : end], function)
            program.functions[function.name] = function
            at = end + 1
    return program


def _closing_brace(text: str, at: int) -> int:
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    raise ValueError("PTX: a brace is not closed")


def _variables(text: str) -> list[Variable]:
    found = []
    for m in _VARIABLE.finditer(text):
        unit = size_of(m["type"])
        count = 0 if m["count"] == "" else int(m["count"] or 1)  # `[]`: as large as the launch says
        found.append(Variable(m["name"], m["space"], unit * count, int(m["align"] or unit)))
    return found


def _declare(text: str, variables: dict[str, Variable]) -> None:
    variables.update((variable.name, variable) for variable in _variables(text))


def _parse_body(text: str, function: Function) -> None:
    """Statements end at semicolons, and labels at colons. Braces of inner scopes only hide names, which are unique."""
    for statement in _statements(text):
        statement = statement.strip()
        while label := _LABEL.match(statement):
            function.labels[label[1]] = len(function.code)
            statement = statement[label.end() :].strip()
        if not statement or _IGNORED.match(statement):
            continue
        if statement.startswith(".reg"):
            _declare_registers(statement, function)
        elif statement.startswith("."):
            _declare(statement, function.variables)
        else:
            function.code.append(_instruction(statement))


def _statements(text: str) -> list[str]:
    """The parts between semicolons, without the braces of scopes, which stand where a statement begins or ends."""
    return [re.sub(r"^[\s{}]+|^(\s*[$\w]+:)[\s{}]+", r"\1", part) for part in text.split(";")]


def _declare_registers(statement: str, function: Function) -> None:
    """`.reg .b16 low, high` or `.reg .b32 %r<50>`."""
    _, type_name, names = statement.split(None, 2)
    for m in _REGISTERS.finditer(names):
        all_names = [m["name"]] if m["count"] is None else [f"{m['name']}{i}" for i in range(int(m["count"]))]
        function.registers.update(dict.fromkeys(all_names, type_name.lstrip(".")))


def _instruction(text: str) -> Instruction:
    text = " ".join(text.split())
    guard = re.match(r"@(!?)(%?\w+)\s+", text)
    rest = text[guard.end() :] if guard else text
    opcode, _, operands = rest.partition(" ")
    name, *modifiers = opcode.split(".")
    given = tuple(part.strip() for part in _OPERAND.findall(operands))
    return Instruction(text, name, tuple(modifiers), given, guard[2] if guard else "", bool(guard and guard[1]))
