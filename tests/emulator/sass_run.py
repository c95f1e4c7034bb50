"""Runs a kernel's machine code for sm_90, as nvdisasm lists it, and counts the instructions that its warps issue.

It knows the instructions that the kernels for rows of float and 16-bit elements consist of, and fails at others. That
it knows them right shows in the output, which is looked at. A warp issues an instruction once for those of its 32 lanes
that have come there together; lanes that part meet again at a BSYNC or WARPSYNC. Predicated instructions, and those of
idle lanes, are issued all the same.
"""

import operator
import re

import numpy as np
import sass

LANES = np.arange(32)
MASK = (1 << 32) - 1
PARAMETERS = 0x210  # where they lie in the constant bank
IN_CLUSTER = 0x140  # there, too: whether blocks run in clusters
SHARED_WINDOW = 1 << 24  # of a block of a cluster, among the addresses of shared memory
NAME = re.compile(r"^[-~!|]*(U?[RP])(Z|T|R|\d+)\b")
COMPARISONS = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}


def uint(values):
    return np.asarray(values).astype(np.uint64).astype(np.uint32)


def signed(values):
    return values.astype(np.uint32).view(np.int32).astype(np.int64)


def wide(values):
    return values.astype(np.uint64)


class Code:
    """A kernel's instructions."""

    def __init__(self, section):
        code, self.labels = sass.instructions(section)
        self.instructions = []
        self.barriers = {}  # where a BSSY has its lanes go on
        for predicate, opcode, operands in code:
            predicate = predicate.strip().lstrip("@")
            name, *modifiers = opcode.split(".")
            parts = [part.strip().replace(".reuse", "") for part in operands.split(",")] if operands.strip() else []
            self.instructions.append((predicate, name, modifiers, parts))


class Warp:
    def __init__(self, block, index):
        self.block, self.code = block, block.code
        self.threads = index * 32 + LANES
        self.registers = {kind: np.zeros((256, 32), np.uint32) for kind in ("R", "UR")}
        self.predicates = {kind: np.zeros((8, 32), bool) for kind in ("P", "UP")}
        self.barriers = {}  # lanes that meet there
        self.waiting = np.full(32, None, object)
        self.at = np.zeros(32, int)
        self.alive = np.ones(32, bool)
        self.issued = 0

    # ---- operands ----------------------------------------------------------------------------------------------------

    def predicate(self, text):
        kind, number = NAME.match(text).groups()
        value = np.ones(32, bool) if number == "T" else self.predicates[kind][int(number)]
        return ~value if text.startswith("!") else value

    def register(self, text, offset=0):
        kind, number = NAME.match(text).groups()
        return np.zeros(32, np.uint32) if number == "Z" else self.registers[kind][int(number) + offset]

    def word(self, text, offset=0):
        """The 32 bits of an integer operand; `offset` words on."""
        bare = text.lstrip("-~|").rstrip("|")
        if bare.startswith("c["):
            value = np.full(32, self.block.constant(self.constant_address(bare) + 4 * offset, 4), np.uint32)
        elif NAME.match(bare):
            value = self.register(bare, offset)
        else:
            value = np.full(32, (int(text, 0) >> (32 * offset)) & MASK, np.uint32)
            return value
        return (
            ~value if text.startswith("~") else uint(-wide(value).astype(np.int64)) if text.startswith("-") else value
        )

    def long(self, text):
        if NAME.match(text) and NAME.match(text)[2] == "Z":
            return np.zeros(32, np.uint64)
        return wide(self.word(text)) | wide(self.word(text, 1)) << np.uint64(32)

    def constant_address(self, text):
        register, offset = re.fullmatch(r"c\[0x0\]\[(?:(U?R(?:\d+|Z))\+?)?(0x[0-9a-f]+)?\]", text).groups()
        return int(offset or "0", 0) + (int(self.register(register)[0]) if register else 0)

    def float(self, text):
        bare = text.lstrip("-~|").rstrip("|")
        if bare.startswith("c[") or NAME.match(bare):
            value = self.word(bare).view(np.float32)
        else:
            value = np.full(32, float(bare.replace("QNAN", "nan")), np.float32)
        value = np.abs(value) if "|" in text else value
        return -value if text.startswith("-") else value

    def write(self, to, value, active, offset=0):
        kind, number = NAME.match(to).groups()
        if number in "ZT":
            return
        if kind in ("P", "UP"):
            where, value = self.predicates[kind][int(number)], np.broadcast_to(value, 32)
        else:
            value = np.broadcast_to(value, 32)
            value = value.view(np.uint32) if value.dtype == np.float32 else uint(value & MASK)
            where = self.registers[kind][int(number) + offset]
        if kind.startswith("U"):
            where[:] = value[active][0]
        else:
            where[active] = value[active]

    def write_long(self, to, value, active):
        self.write(to, value & np.uint64(MASK), active)
        self.write(to, value >> np.uint64(32), active, 1)

    def addresses(self, text):
        """Of [R1.64+UR2+0x10] or desc[UR0][...]."""
        total = np.zeros(32, np.int64)
        for part in re.search(r"\[([^\[\]]*)\]$", text)[1].split("+"):
            part, sign = part.strip(), 1
            if part.startswith("-0x"):
                part, sign = part[1:], -1
            if scaled := re.fullmatch(r"(R\d+|RZ)\.X(\d+)", part):
                total += self.word(scaled[1]).astype(np.int64) * int(scaled[2])
            elif part.endswith(".64"):
                total += self.long(part[:-3]).astype(np.int64)
            elif NAME.match(part):
                narrow = "desc" in text and part.startswith("UR")
                total += self.long(part).astype(np.int64) if narrow else signed(self.word(part))
            elif part:
                total += sign * int(part, 0)
        return total if "desc" in text else total & MASK

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self):
        """Until the end; stops wherever a warp waits for the others of its block."""
        while self.alive.any():
            ready = self.alive & (self.waiting == None)  # noqa: E711
            if not ready.any():
                raise AssertionError("no lane can go on")
            at = self.at[ready].min()
            active = ready & (self.at == at)
            predicate, name, modifiers, operands = self.code.instructions[at]
            self.issued += name != "NOP"
            self.at[active] = at + 1
            taking = active & self.predicate(predicate) if predicate else active
            flow = getattr(self, "flow_" + name, None)
            if flow:
                if meets := flow(modifiers, operands, taking, active):
                    yield meets
            elif taking.any():
                method = getattr(self, "do_" + name, None) or getattr(self, "do_" + name[1:])
                method(modifiers, operands, taking)

    def flow_BRA(self, modifiers, operands, taking, active):
        if modifiers == ["DIV"]:
            assert (active == self.alive).all()
            return
        if len(operands) > 1:
            taking = taking & self.predicate(operands[0])
        if "ANY" in modifiers and taking.any():
            taking = active
        self.at[taking] = self.code.labels[sass.TARGET.search(operands[-1])[1]]

    def flow_BSSY(self, modifiers, operands, taking, active):
        self.barriers[operands[0]] = taking.copy(), self.code.labels[sass.TARGET.search(operands[1])[1]]

    def flow_BSYNC(self, modifiers, operands, taking, active):
        self.waiting[taking] = operands[0]
        self.release()

    def flow_WARPSYNC(self, modifiers, operands, taking, active):
        assert modifiers == ["ALL"]
        self.waiting[taking] = "WARPSYNC"
        self.release()

    def flow_EXIT(self, modifiers, operands, taking, active):
        self.alive[taking] = False
        self.release()

    def release(self):
        for name, (lanes, target) in self.barriers.items():
            here = self.waiting == name
            if here.any() and (here == (lanes & self.alive)).all():
                self.at[here], self.waiting[here] = target, None
        here = self.waiting == "WARPSYNC"
        if here.any() and (here == self.alive).all():
            self.waiting[here] = None

    def flow_BAR(self, modifiers, operands, taking, active):
        assert not taking.any() or (taking == self.alive).all()
        return taking.any() and "block"

    def flow_UCGABAR_WAIT(self, modifiers, operands, taking, active):
        return "cluster"

    def nothing(self, modifiers, operands, taking, active=None):
        pass

    do_NOP = do_LDGDEPBAR = do_DEPBAR = do_UCGABAR_ARV = do_ACQBULK = do_PREEXIT = do_MEMBAR = nothing
    do_ERRBAR = do_CGAERRBAR = do_CCTL = do_FENCE = nothing

    # ---- integers ----------------------------------------------------------------------------------------------------

    def do_MOV(self, modifiers, operands, active):
        self.write(operands[0], self.word(operands[1]), active)

    do_R2UR = do_MOV

    def do_CS2R(self, modifiers, operands, active):
        assert operands[1] == "SRZ"
        self.write_long(operands[0], np.zeros(32, np.uint64), active)

    def do_S2R(self, modifiers, operands, active):
        special = {"SR_TID.X": self.threads, "SR_CTAID.X": self.block.index, "SR_CTAID.Y": 0, "SR_CTAID.Z": 0}
        special["SR_CgaCtaId"] = self.block.rank
        special["SR_SWINHI"] = 0  # upper half of the addresses of shared memory
        self.write(operands[0], np.broadcast_to(special[operands[1]], 32), active)

    do_S2UR = do_S2R

    def do_IMAD(self, modifiers, operands, active):
        to, a, b, c, *carry = operands
        carry = self.predicate(carry[0]) if carry else 0
        read = wide if "U32" in modifiers else signed
        # HI and WIDE of signed numbers: in two's complement
        product = (read(self.word(a)).astype(np.int64) * read(self.word(b)).astype(np.int64)).view(np.uint64)
        if "WIDE" in modifiers:
            self.write_long(to, product + self.long(c), active)
        elif "HI" in modifiers:
            self.write(to, product + self.long(c) >> np.uint64(32), active)
        else:
            self.write(to, product + wide(self.word(c)) + carry, active)

    def do_IADD3(self, modifiers, operands, active):
        to, *rest = operands
        carries = []
        while NAME.match(rest[0]) and NAME.match(rest[0])[1] in ("P", "UP"):
            carries.append(rest.pop(0))
        total = np.zeros(32, np.uint64)
        for text in rest[:3]:
            negated = text.startswith("-")
            total += (np.uint64(1 << 32) - wide(self.word(text[1:]))) if negated else wide(self.word(text))
        for text in rest[3:]:
            total += self.predicate(text)
        for i, carry in enumerate(carries):
            self.write(carry, total >> np.uint64(32) > i, active)
        self.write(to, total & np.uint64(MASK), active)

    def do_VIADD(self, modifiers, operands, active):
        self.write(operands[0], signed(self.word(operands[1])) + signed(self.word(operands[2])), active)

    do_IADD = do_VIADD

    def least_or_most(self, modifiers, to, a, b, choose, active):
        value = np.where(self.predicate(choose), np.minimum(a, b), np.maximum(a, b))
        self.write(to, np.maximum(value, 0) if "RELU" in modifiers else value, active)

    def do_VIMNMX(self, modifiers, operands, active):
        to, a, b, choose = operands
        read = wide if "U32" in modifiers else signed
        self.least_or_most(modifiers, to, read(self.word(a)), read(self.word(b)), choose, active)

    do_IMNMX = do_VIMNMX

    def do_VIADDMNMX(self, modifiers, operands, active):
        to, a, b, c, choose = operands
        total = signed(uint(signed(self.word(a)) + signed(self.word(b)) & MASK))
        self.least_or_most(modifiers, to, total, signed(self.word(c)), choose, active)

    def do_LEA(self, modifiers, operands, active):
        to, *rest = operands
        carry_out = rest.pop(0) if NAME.match(rest[0]) and NAME.match(rest[0])[1] in ("P", "UP") else None
        carry_in = self.predicate(rest.pop()) if "X" in modifiers else 0
        value = wide(self.word(rest[0]))
        if "HI" in modifiers:
            if "SX32" in modifiers:
                high = (signed(self.word(rest[0])) >> 32).view(np.uint64) & np.uint64(MASK)
            else:
                high = wide(self.word(rest[2]))
            shift = np.uint64(int(rest[-1], 0))
            shifted = (value | high << np.uint64(32)) << shift >> np.uint64(32)
        else:
            shifted = value << np.uint64(int(rest[-1], 0) if len(rest) > 2 else 0) & np.uint64(MASK)
        total = shifted + wide(self.word(rest[1])) + carry_in
        if carry_out:
            self.write(carry_out, total >> np.uint64(32) > 0, active)
        self.write(to, total & np.uint64(MASK), active)

    def do_SHF(self, modifiers, operands, active):
        to, low, by, high = operands
        value = wide(self.word(low)) | wide(self.word(high)) << np.uint64(32)
        by = wide(self.word(by)) & np.uint64(63)
        if modifiers[0] == "L":
            value = value << by
        else:
            value = (
                (value.view(np.int64) >> by.astype(np.int64)).view(np.uint64) if "S" in modifiers[1] else value >> by
            )
        self.write(to, value >> np.uint64(32) if "HI" in modifiers else value & np.uint64(MASK), active)

    @staticmethod
    def lookup(table, a, b, c):
        result = a & False if a.dtype == bool else a & np.uint32(0)
        for i in range(8):
            if table >> i & 1:
                result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    def do_LOP3(self, modifiers, operands, active):
        to_predicate = operands[0] if NAME.match(operands[0])[1] in ("P", "UP") else None
        to, a, b, c, table, *_ = operands[1:] if to_predicate else operands
        value = self.lookup(int(table, 0), self.word(a), self.word(b), self.word(c))
        if to_predicate:
            self.write(to_predicate, value != 0, active)
        self.write(to, value, active)

    def do_PLOP3(self, modifiers, operands, active):
        to, also, a, b, c, table, other = operands
        inputs = [self.predicate(p).copy() for p in (a, b, c)]
        self.write(to, self.lookup(int(table, 0), *inputs), active)
        self.write(also, self.lookup(int(other, 0), *inputs), active)

    def do_SEL(self, modifiers, operands, active):
        to, a, b, choose = operands
        self.write(to, np.where(self.predicate(choose), self.word(a), self.word(b)), active)

    def do_FSEL(self, modifiers, operands, active):
        to, a, b, choose = operands
        self.write(to, np.where(self.predicate(choose), self.float(a), self.float(b)), active)

    def do_PRMT(self, modifiers, operands, active):
        to, a, selector, b = operands
        both = wide(self.word(a)) | wide(self.word(b)) << np.uint64(32)
        selector = wide(self.word(selector))
        result = np.zeros(32, np.uint64)
        for i in range(4):
            choice = selector >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
            result |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
        self.write(to, result, active)

    def compare(self, operands, a, b, modifiers, active):
        to, also, _, _, last, *extended = operands
        name = modifiers[0]
        if name == "NAN":
            result = np.isnan(a) | np.isnan(b)
        else:
            result = COMPARISONS[name.removesuffix("U")](a, b)
            if name.endswith("U"):
                result = result | np.isnan(a) | np.isnan(b)
        if extended:
            low = self.predicate(extended[0])
            result = result | low if name == "NE" else (result & (a != b)) | ((a == b) & low)
        last = self.predicate(last).copy()
        combine = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}[
            next(m for m in modifiers if m in ("AND", "OR", "XOR"))
        ]
        self.write(to, combine(result, last), active)
        self.write(also, combine(~result, last), active)

    def do_ISETP(self, modifiers, operands, active):
        read = wide if "U32" in modifiers else signed
        self.compare(operands, read(self.word(operands[2])), read(self.word(operands[3])), modifiers, active)

    def do_FSETP(self, modifiers, operands, active):
        self.compare(operands, self.float(operands[2]), self.float(operands[3]), modifiers, active)

    def do_R2P(self, modifiers, operands, active):
        value, mask = self.word(operands[1]), int(operands[2], 0)
        byte = int(re.search(r"\.B(\d)", operands[1])[1]) if ".B" in operands[1] else 0
        for i in range(7):
            if mask >> i & 1:
                self.write(f"P{i}", value >> np.uint32(i + 8 * byte) & np.uint32(1) != 0, active)

    def do_P2R(self, modifiers, operands, active):
        bits = sum(self.predicates["P"][i].astype(np.uint32) << np.uint32(i) for i in range(7))
        mask = np.uint32(int(operands[3], 0))
        self.write(operands[0], bits & mask | self.word(operands[2]) & ~mask, active)

    def do_VOTE(self, modifiers, operands, active):
        votes = (self.predicate(operands[-1]) & active)[active]
        result = votes.any() if modifiers[0] == "ANY" else votes.all()
        self.write(operands[0] if len(operands) == 2 else operands[1], np.full(32, result), active)
        if len(operands) > 2:
            self.write(operands[0], np.full(32, sum(1 << i for i in LANES[active] if votes[i])), active)

    def do_SHFL(self, modifiers, operands, active):
        _, to, value, lane, clamp = operands
        lane, clamp = self.word(lane).astype(int), int(clamp, 0)
        assert clamp == 0x1F and active.all()
        source = LANES ^ lane if modifiers[0] == "BFLY" else lane & 31
        self.write(to, self.word(value)[source], active)

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def do_FADD(self, modifiers, operands, active):
        self.write(operands[0], self.float(operands[1]) + self.float(operands[2]), active)

    def do_FMUL(self, modifiers, operands, active):
        self.write(operands[0], self.float(operands[1]) * self.float(operands[2]), active)

    def do_FFMA(self, modifiers, operands, active):
        a, b, c = (self.float(text).astype(np.float64) for text in operands[1:4])
        self.write(operands[0], (a * b + c).astype(np.float32), active)

    def do_FMNMX(self, modifiers, operands, active):
        a, b = self.float(operands[1]), self.float(operands[2])
        self.write(operands[0], np.where(self.predicate(operands[3]), np.fmin(a, b), np.fmax(a, b)), active)

    def do_MUFU(self, modifiers, operands, active):
        value = self.float(operands[1])
        assert modifiers[0] in ("RCP", "RSQ")
        self.write(operands[0], 1 / (value if modifiers[0] == "RCP" else np.sqrt(value)), active)

    def do_FCHK(self, modifiers, operands, active):
        """Whether a / b takes the slow path."""
        a, b = self.float(operands[1]), self.float(operands[2])
        with np.errstate(all="ignore"):
            tame = [np.isfinite(v) & (np.abs(v) < 2.0**100) & ((np.abs(v) > 2.0**-80) | (v == 0)) for v in (a, b)]
        self.write(operands[0], ~(tame[0] & tame[1]), active)

    def do_I2FP(self, modifiers, operands, active):
        read = wide if "U32" in modifiers else signed
        self.write(operands[0], read(self.word(operands[1])).astype(np.float32), active)

    def do_I2F(self, modifiers, operands, active):
        if "S64" in modifiers:
            self.write(operands[0], self.long(operands[1]).view(np.int64).astype(np.float32), active)
        else:
            self.do_I2FP(modifiers, operands, active)

    def do_F2I(self, modifiers, operands, active):
        self.write(operands[0], self.float(operands[1]).astype(np.int64), active)

    def do_F2F(self, modifiers, operands, active):
        if modifiers == ["F64", "F32"]:
            self.write_long(operands[0], self.float(operands[1]).astype(np.float64).view(np.uint64), active)
        else:
            assert modifiers == ["F32", "F64"]
            self.write(operands[0], self.long(operands[1]).view(np.float64).astype(np.float32), active)

    def do_DADD(self, modifiers, operands, active):
        a, b = (self.long(text).view(np.float64) for text in operands[1:])
        self.write_long(operands[0], (a + b).view(np.uint64), active)

    def do_F2FP(self, modifiers, operands, active):
        def bits(value):
            if "BF16" in modifiers:
                word = wide(value.view(np.uint32))
                return word + np.uint64(0x7FFF) + (word >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
            return wide(value.astype(np.float16).view(np.uint16))

        high, low = (bits(self.float(text).copy()) for text in operands[1:3])
        self.write(operands[0], high << np.uint64(16) | low, active)

    def half(self, text):
        word = self.word(text.partition(".")[0])
        return (word >> np.uint32(16 if "H1_H1" in text else 0)).astype(np.uint16).view(np.float16).astype(np.float32)

    def do_HADD2(self, modifiers, operands, active):
        assert modifiers[0] == "F32" and operands[1] == "-RZ"
        self.write(operands[0], self.half(operands[2]), active)

    def do_HFMA2(self, modifiers, operands, active):
        """A constant, of two halves."""
        assert operands[1].lstrip("-") == operands[2].lstrip("-") == "RZ"
        high, low = (int(np.float16(float(text)).view(np.uint16)) for text in operands[3:5])
        self.write(operands[0], np.full(32, high << 16 | low), active)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def do_LDC(self, modifiers, operands, active):
        address = self.constant_address(operands[1])
        if "64" in modifiers:
            self.write_long(operands[0], np.full(32, self.block.constant(address, 8), np.uint64), active)
        else:
            size = 1 if "U8" in modifiers else 4
            self.write(operands[0], np.full(32, self.block.constant(address, size)), active)

    def access(self, modifiers):
        for bits in (128, 64):
            if str(bits) in modifiers:
                return bits // 8
        return 2 if "U16" in modifiers else 1 if "U8" in modifiers else 4

    def load(self, memory, modifiers, operands, active):
        size, addresses = self.access(modifiers), self.addresses(operands[1])
        for lane in LANES[active]:
            data = memory(int(addresses[lane]), size)
            words = np.frombuffer(data.tobytes().ljust(4, b"\0"), np.uint32)
            for i, word in enumerate(words):
                only = lane == LANES
                self.write(operands[0], np.full(32, word), only, i)

    def store(self, memory, modifiers, operands, active):
        size, addresses = self.access(modifiers), self.addresses(operands[0])
        for lane in LANES[active]:
            words = [self.register(operands[1], i)[lane] for i in range(max(size // 4, 1))]
            memory(int(addresses[lane]), size)[:] = np.array(words, np.uint32).view(np.uint8)[:size]

    def do_LDG(self, modifiers, operands, active):
        self.load(self.block.memory, modifiers, operands, active)

    def do_STG(self, modifiers, operands, active):
        self.store(self.block.memory, modifiers, operands, active)

    def do_ST(self, modifiers, operands, active):
        """To shared memory of a block of the cluster."""
        self.store(self.block.shared_of_cluster, modifiers, operands, active)

    def do_LDS(self, modifiers, operands, active):
        self.load(self.block.shared, modifiers, operands, active)

    def do_STS(self, modifiers, operands, active):
        self.store(self.block.shared, modifiers, operands, active)

    def do_LDGSTS(self, modifiers, operands, active):
        """The last operand: whether there is something to copy, else zeros."""
        to, of = self.addresses(operands[0]), self.addresses(operands[1])
        exists = self.predicate(operands[2]) if len(operands) > 2 else np.ones(32, bool)
        for lane in LANES[active]:
            self.block.shared(int(to[lane]), 16)[:] = self.block.memory(int(of[lane]), 16) if exists[lane] else 0

    def do_ELECT(self, modifiers, operands, active):
        self.write(operands[0], LANES[active][0] == LANES, active)

    def do_UBLKCP(self, modifiers, operands, active):
        """Copies at once. The register after that of the place to copy to has the barrier."""
        assert modifiers == ["S", "G"]
        lane = LANES[active][0]
        to, of = (operand.strip("[]") for operand in operands[:2])
        size = 16 * int(self.word(operands[2])[lane] & 0xFFFF)
        begin, end = int(self.long(of)[lane]), int(self.word(to)[lane])
        for offset in range(0, size, 16):
            self.block.shared(end + offset, 16)[:] = self.block.memory(begin + offset, 16)
        self.block.arrive(int(self.word(to, 1)[lane]), 0, -size)

    def do_SYNCS(self, modifiers, operands, active):
        lane = LANES[active][0]
        address = int(self.addresses(operands[1])[lane])
        if modifiers[0] == "EXCH":
            self.block.barriers[address] = [0, 1, 0]
        elif modifiers[0] == "ARRIVE":
            self.block.arrive(address, 1, int(self.word(operands[2])[lane]))
        else:
            assert modifiers[0] == "PHASECHK"
            parity = int(self.word(operands[2])[lane]) >> 31
            assert self.block.barriers[address][0] != parity, "waits for what nobody has begun to copy"
            self.write(operands[0], np.ones(32, bool), active)


class Block:
    def __init__(self, code, launch, index, rank=0):
        self.code, self.launch, self.index, self.rank = code, launch, index, rank
        self.bytes = np.zeros(256 * 1024, np.uint8)
        self.barriers = {}  # mbarriers: parity, arrivals to come, bytes to come
        self.warps = [Warp(self, i) for i in range(launch.threads // 32)]

    def constant(self, address, size):
        return int.from_bytes(self.launch.constants[address : address + size], "little")

    def memory(self, address, size):
        return self.launch.memory(address, size)

    def shared(self, address, size):
        address &= SHARED_WINDOW - 1
        assert address % size == 0 and address + size <= len(self.bytes)
        return self.bytes[address : address + size]

    def arrive(self, address, arrivals, more_bytes):
        barrier = self.barriers[address]
        barrier[1] -= arrivals
        barrier[2] += more_bytes
        if barrier[1:] == [0, 0]:
            barrier[:] = [barrier[0] ^ 1, 1, 0]

    def shared_of_cluster(self, address, size):
        block = self.launch.blocks[(address & MASK) // SHARED_WINDOW]
        return block.shared(address & MASK, size)


class Launch:
    """Of blocks that run together: of a cluster, or of one."""

    def __init__(self, section, parameters, threads, first_block=0, blocks=1):
        self.code, self.threads = Code(section), threads
        self.constants = bytearray(PARAMETERS) + parameters + bytes(64)
        self.constants[0:4] = threads.to_bytes(4, "little")
        self.constants[IN_CLUSTER] = blocks > 1
        self.buffers = []
        self.blocks = [Block(self.code, self, first_block + rank, rank) for rank in range(blocks)]

    def memory(self, address, size):
        assert address % size == 0
        for buffer in self.buffers:
            offset = address - buffer.ctypes.data
            if offset >= 0 and offset + size <= buffer.nbytes:
                return buffer.view(np.uint8)[offset : offset + size]
        raise AssertionError(f"{size} bytes at {address:#x} of no buffer")

    def run(self):
        """Return the instructions that the warps have issued."""
        with np.errstate(all="ignore"):
            blocks = [[warp.run() for warp in block.warps] for block in self.blocks]
            waits = [["block"] * len(warps) for warps in blocks]
            while any(map(any, waits)):
                for warps, wait in zip(blocks, waits, strict=True):
                    if "block" in wait:
                        wait[:] = [
                            next(warp, None) if at == "block" else at for warp, at in zip(warps, wait, strict=True)
                        ]
                if not any("block" in wait for wait in waits):
                    for warps, wait in zip(blocks, waits, strict=True):
                        wait[:] = [next(warp, None) for warp in warps]
        return sum(warp.issued for block in self.blocks for warp in block.warps)
