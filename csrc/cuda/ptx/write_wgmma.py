"""Writes wgmma_instructions.h: PTX names every register of an instruction one by one.

C++ cannot do it with an index sequence: the operands of an asm statement cannot expand a parameter
pack, so nvcc rejects `"+f"(d[I])...`.

python csrc/cuda/ptx/write_wgmma.py > csrc/cuda/ptx/wgmma_instructions.h
"""

# Products that compute scores read a and b from shared memory, not transposed. Products with scores
# read the scores from registers and b transposed. 64 columns have all forms, for tests.
ROWS = (32, 48, 64, 80, 96)  # columns of scores
TRANSPOSED = (64, 96, 128, 192, 256)  # columns of values
TYPES = {"Bf16": "bf16", "F16": "f16"}


def lines(prefix: str, items: list[str], suffix: str) -> str:
    """`items` with commas between them, in lines of about 100 characters."""
    rows, row = [], prefix
    for n, item in enumerate(items):
        word = item + ("" if n == len(items) - 1 else ", ")
        if len(row) + len(word) > 97:
            rows.append(row.rstrip())
            row = prefix
        row += word
    return "\n".join([*rows, row + suffix])


def quoted(items: list[str], before: str, after: str) -> str:
    """A list of items as C string literals, wrapped."""
    rows, row = [], before
    for n, item in enumerate(items):
        word = item + ("" if n == len(items) - 1 else ", ")
        if len(row) + len(word) > 84:
            rows.append(row)
            row = ""
        row += word
    rows.append(row + after)
    return "\n".join(f'        "{row}"' for row in rows)


def instruction(element: str, n: int, transposed: bool, in_registers: bool) -> str:
    """One wgmma instruction as inline assembler."""
    count = n // 2
    outputs = [f"%{i}" for i in range(count)]
    a = [f"%{count + i}" for i in range(4)] if in_registers else [f"%{count}"]
    b, flag = count + len(a), count + len(a) + 1
    operand = "{" + ", ".join(a) + "}" if in_registers else a[0]
    majors = f", {int(transposed)}" if in_registers else f", 0, {int(transposed)}"
    head = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} "
    body = quoted(outputs, "{", "}, ")
    constraints = lines("          ", [f'"+f"(d[{i}])' for i in range(count)], "")
    inputs = [f'"r"(a[{i}])' for i in range(4)] if in_registers else ['"l"(a)']
    inputs += ['"l"(b)', '"r"(static_cast<int>(accumulate))']
    kind, a_type = ("rs", "const uint32_t (&a)[4]") if in_registers else ("ss", "uint64_t a")
    return f"""\
  static FASTATTN_DEVICE void {kind}(float (&d)[{count}], {a_type}, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{flag}, 0;\\n"
        "{head}"
{body}
        "{operand}, %{b}, p, 1, 1{majors}; }}\\n"
        :
{constraints}
        : {", ".join(inputs)});
  }}
"""


def main() -> None:
    """Print all instructions."""
    print("// Written by write_wgmma.py. Included by wgmma.h, within its namespace.")
    print("// clang-format off")
    for name, element in TYPES.items():
        for transposed, columns in ((False, ROWS), (True, TRANSPOSED)):
            for n in columns:
                flag = str(transposed).lower()
                print(f"template <>\nstruct Wgmma<{name}, {n}, {flag}> {{")
                for in_registers in (False, True):
                    if n == 64 or in_registers == transposed:
                        print(instruction(element, n, transposed, in_registers), end="")
                print("};")
    print("// clang-format on")


if __name__ == "__main__":
    main()
