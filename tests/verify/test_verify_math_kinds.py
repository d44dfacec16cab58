"""Kinds of answers that graders get wrong, each in both directions: "+ gold ;; answer" is right, "- gold ;; answer" is
wrong; after "+!" and "-!" stands a whole response, with ⏎ for a line break.

Planted faults seen caught here: the lead of an answer kept; boxes never joined, always joined, joined over words;
statements not taken; "$ and $" taken for a product; two primes as one, primes dropped; "and a half" a unit; percent of
percent; a value that stays unevaluated; 5 ∈ {5}; residues not reduced; a modulus left out; open intervals that touch
joined; any letter a constant of integration; "0, 1" for [0, 1]; the k of k ∈ ℤ by its letter; renaming onto a name in
use; number words and aligned lines not read.
"""

import time

import pytest

from apportion.verify import grade
from apportion.verify.extract import final_answer, side_by_side
from apportion.verify.math import MathSettings, decide, gold_answers, graded_answer, quick

TABLE = r"""
# extract
+! 5 ;; \boxed 5
-! 5 ;; <think>\boxed{5}</think> \boxed{6}
+! 5 ;; The final answer is 5.
+! 5 ;; Final Answer: The final answer is $5$. I hope it is correct.
+! 5 ;; The answer is: 5
-! 5 ;; we get 5 and 6
+! 1,2 ;; \boxed{1} and \boxed{2}
+! 1,2 ;; The solutions are $\boxed{2}$, $\boxed{1}$.
+! 5 ;; \boxed{\text{The answer is } 5}
+! 5 ;; \boxed{\text{Answer: } 5}
+! 5 ;; the result is x = 5
+! 5 ;; \boxed {5}
+! 5 ;; The answer is therefore 5.
+! 5 ;; **Answer**⏎5
+! 5 ;; ### Final Answer⏎⏎$5$
+! 5 ;; **Final Answer**⏎⏎5
+! 5 ;; My answer would be 5.
+! 5 ;; The answer equals 5
+! 5 ;; Therefore, x = 5.
+! 12 ;; Thus the area is $12$.
+! 5 ;; <answer>The answer is 5.</answer>
-! 3 ;; <answer>3</answer> no, <answer>5</answer>
-! 5 ;; The number of apples is 5 but I am not sure
-! 5 ;; The answer could be 5
-! 5 ;; The answer is either 5 or 6.
-! 5 ;; The answer should be 5 or 6
+! 5 ;; The answer should be 5
+! 6 ;; Answer⏎6
+! 5,6 ;; $\boxed{5}$ and $\boxed{6}$
+! 5,6 ;; $\boxed{5}$, $\boxed{6}$
-! 5,6 ;; $\boxed{4}$, $\boxed{5}$, $\boxed{6}$
+! 5 ;; \boxed{4}, \boxed{5}
-! 5 ;; \boxed{\text{The answer is not } 5}
-! 5 ;; \boxed{\text{The answer is 4 or } 5}
+! 5 ;; \boxed{\text{The answer is 5}}
+! \text{yes} ;; \boxed{\text{The answer is yes}}
+! 5 ;; So the final answer is:⏎\[⏎\boxed{5}⏎\]
+! 5 ;; So the final answer is:⏎\[⏎5⏎\]
+! 5 ;; The answer is⏎$$⏎5⏎$$
-! 5 ;; The answer is⏎$$⏎5+x⏎$$
-! 5 ;; The answer is $5$ or $6$.
+! 5,6 ;; The answers are $5$ and $6$.
+! 12 ;; We have 3 times 4. Hence the total is 12.
+! x+1 ;; So x+1
+! x+1 ;; Thus $x+1$.
+! \frac{1}{2} ;; Therefore, $\frac{1}{2}$
+! 5 ;; The value of $x$ is $5$.
-! AB is parallel to CD ;; EF is parallel to CD
# numbers
+ 10{,}000 ;; 10,000
- 50 ;; 5
- 3\frac{1}{4} ;; \frac{3}{4}
- 3\frac{1}{4} ;; 3
- 0.\overline{3} ;; 0.3
+ 2^{10} ;; 1024
+ 1024 ;; 2^10
+ {5 \choose 2} ;; 10
- 4 ;; 4\sqrt2
+ \lg 100 ;; 2
+ \cos(2x) ;; 2\cos^2 x - 1
+ \frac12 ;; \nicefrac{1}{2}
+ \log_3(x+1) ;; \frac{\ln(x+1)}{\ln 3}
+ \lvert -3 \rvert ;; 3
+ \gcd(4,6) ;; 2
- 2025 ;; 2025.5
+ 0.\overline{9} ;; 1
+ 0.(3) ;; \frac13
# percent, currency, units, degrees
- 50\% ;; 0.05
+ 5 ;; 5 \text{ cm}^2
+ 25\pi ;; 25\pi cm^2
+ 1101_2 ;; (1101)_2
+ 2516_8 ;; 2516_{\text{eight}}
- 5\text{ ft} ;; 5''
+ 5\text{ ft} ;; 5'
+ 0.003'' ;; 0.003
- 5' ;; 5''
- 5 ;; 5\text{ and a half}
- 5 ;; 5 \text{ or more}
- 5 ;; 5\text{ dozen}
- 5 ;; 5 dozen
+ 5\text{ sec} ;; 5\text{ seconds}
+ 5\text{ min} ;; 5 minutes
- 5\text{ min} ;; 5 sec
+ 2\sec x ;; \frac{2}{\cos x}
+ 10\text{ m s}^{-1} ;; 10\text{ m/s}
+ 10\text{ m/s}^2 ;; 10\text{ m}\text{s}^{-2}
- 10\text{ m/s}^2 ;; 10\text{ m/s}
+ 2.5\text{ billion} ;; 2500000000
- 2.5\text{ billion} ;; 2.5\text{ million}
+ \$2.5\text{ billion} ;; 2.5 \times 10^9
- 1A_{16} ;; 1B_{16}
+ 1A_{16} ;; (1A)_{16}
+ 1A_{16} ;; 1A_{\text{sixteen}}
- 5\%  ;; 5\%\%
+ 25\pi\text{ cm} ;; 25\pi cm
- 25\pi\text{ cm} ;; 25\pi mm
# intervals, unions, inequalities
- [0,1) ;; (0,1]
+ (0,1)\cup(1,2) ;; (0,2)\setminus\{1\}
+ (-\infty,\infty) ;; all real numbers
+ (-\infty,\infty) ;; \text{all real numbers}
+ (-\infty,-2)\cup(2,\infty) ;; |x|>2
+ x\ne 3 ;; (-\infty,3)\cup(3,\infty)
- [0,1] ;; 0,1
+ ]0,1[ ;; (0,1)
+ (0,2)\setminus\{1\} ;; (0,1)\cup(1,2)
- (0,2)\setminus\{1\} ;; (0,2)
- (0,2)\setminus\{1\} ;; (0,1]\cup(1,2)
+ [0,2]\setminus\{1\} ;; [0,1)\cup(1,2]
+ [0,1]\cup[1,2] ;; [0,2]
+ [0,1)\cup[1,2] ;; [0,2]
+ (0,1)\cup\{1\} ;; (0,1]
+ (0,1)\cup\{2\} ;; \{2\}\cup(0,1)
- (0,1)\cup\{2\} ;; (0,1)\cup\{3\}
- (0,1)\cup\{2\} ;; (0,1)
+ [-\sqrt2,0]\cup[0,\sqrt2] ;; [-\sqrt2,\sqrt2]
+ [a,b]\cup[c,d] ;; [c,d]\cup[a,b]
- [0,1] ;; 0, 1
+ ]0,1] ;; (0,1]
- ]0,1] ;; [0,1]
+ ]-\infty,1[\cup]2,\infty[ ;; (-\infty,1)\cup(2,\infty)
+ -1<x\le 1:(-1,1] ;; (-1,1]
+ -1<x\le 1:(-1,1] ;; -1<x\le 1
- -1<x\le 1:(-1,1] ;; (-1,1)
- (-1,1] ;; -1<x\le 2:(-1,1]
+ |x|\ge 2 ;; (-\infty,-2]\cup[2,\infty)
- |x|\ge 2 ;; (-\infty,-2)\cup(2,\infty)
- 1<2x<4 ;; 1<2x\le4
+ 0<a<b<1 ;; 1>b>a>0
- 0<a<b<1 ;; 0<b<a<1
# sets lists tuples
- 1 ;; 1 or 2
- 5 ;; [5,6]
+ (1,2,3) ;; \begin{pmatrix}1\\2\\3\end{pmatrix}
+ \begin{pmatrix}1&2\\3&4\end{pmatrix} ;; [[1,2],[3,4]]
+ \begin{pmatrix}1/2&2\\3&4\end{pmatrix} ;; \frac12\begin{pmatrix}1&4\\6&8\end{pmatrix}
- \begin{vmatrix}1&2\\3&4\end{vmatrix} ;; \begin{pmatrix}1&2\\3&4\end{pmatrix}
+ \emptyset ;; \text{None}
+ no solution ;; there is no solution
+ \infty ;; infinity
+ DNE ;; does not exist
# equations
+ x=5 ;; 5
+ x=5 ;; 5=x
+ x+y=3 ;; 2x+2y=6
# polynomials
+ x^2 ;; x²
+ x^2+C ;; x^2+c
+ x^2+C ;; x^2+K
+ f(x)=x^2 ;; f(t)=t^2
+ a_n=2n+1 ;; 2n+1
# text
+ 10:30 a.m. ;; 10:30 \text{ a.m.}
+ \text{ellipse} ;; an ellipse
+ June 5 ;; June 5th
- June 5 ;; June 6
- June 5 ;; 5
+ 5 ;; five
+ 4 ;; \color{red}4
+ 4 ;; \textcolor{blue}{4}
+ 4 ;; \underline{4}
+ 4 ;; \phantom{x}4
+ \frac{1}{2} ;; \mathord{\frac{1}{2}}
+ 2^{n-1} ;; 2^{(n-1)}
# no stray number
- 2 ;; f(2)
- 2 ;; 2 \% 3
+ 3 \pmod 5 ;; x\equiv 3\pmod 5
# unicode
+ \sqrt[3]{2} ;; ∛2
+ x^{10} ;; x¹⁰
+ x^{-1} ;; x⁻¹
+ 10^{-3} ;; 10⁻³
+ a_{10} ;; a₁₀
+ \frac{1}{8} ;; ⅛
+ \frac{3}{8} ;; ⅜
+ \{1,2\} ;; ｛1，2｝
+ [1,2] ;; ［1，2］
+ 5 ;; ＋5
+ x=5 ;; x＝5
+ \varphi ;; φ
+ \gamma ;; γ
+ x ;; 𝑥
+ e ;; ℯ
+ 3\cdot 4 ;; 3•4
# more wrappers
+ \frac{1}{2} ;; \ensuremath{\frac12}
+ \frac{1}{2} ;; \mathrm{\frac{1}{2}}
+ \frac{1}{2} ;; \text{$\frac{1}{2}$}
+ \frac{1}{2} ;; \begin{aligned}\frac12\end{aligned}
+ 5 ;; \begin{align*} x &= 5 \end{align*}
+ 5 ;; \begin{aligned} x &= 2+3 \\ &= 5 \end{aligned}
+ x=1,y=2 ;; \begin{cases}x=1\\y=2\end{cases}
+ x=1,y=2 ;; \left\{\begin{array}{l}x=1\\y=2\end{array}\right.
+ 10 ;; 10 \frac{\text{m}}{\text{s}}
+ 10\text{ m/s} ;; 10 \frac{\text{m}}{\text{s}}
+ 10\text{ m/s} ;; 10 \text{ m}\,\text{s}^{-1}
+ 45\text{ minutes} ;; 45\text{ min}
- 3.5\text{ million} ;; 3.5
- 3.5 ;; 3.5 million
+ 3500000 ;; 3.5 million
- 3 ;; 3 thousand
+ 3000 ;; 3 thousand
+ 2000000 ;; \$2 million
+ 5\text{ cents} ;; 5¢
+ 50\text{ cents} ;; 50 ¢
+ 5 ;; USD 5
+ 37.5 ;; 37^\circ 30'
+ 5:3 ;; 5 to 3
+ 3:00 ;; 3 pm
+ 3\text{ PM} ;; 3:00 PM
# logic
+ x=1$ or $x=2 ;; 2,1
+ 0,1,2 ;; x\in\{0,1,2\}
+ |x-1|<3 ;; |1-x|<3
- 3<2x+1<7 ;; 3<2x+1<8
+ \frac{\pi}{4}+n\pi, n\in\mathbb{Z} ;; \frac{\pi}{4}+k\pi, k\in\mathbb{Z}
+ [0,1]\cup[1,2] ;; [0,2]
+ (1,2]\cup(2,3) ;; (1,3)
+ \{1\}\cup\{2\} ;; \{1,2\}
- 17 ;; 17 = 16
- 5 ;; x \ne 5
- 5 ;; 5\%\%
- 5 ;; 5]
- 5 ;; 5 % 3
- 5 ;; 5 \in \{5\}
- 5 ;; 5 \text{ and a half}
# words
+ five ;; 5
+ twenty-one ;; 21
- twenty-one ;; 20
- 1 ;; one solution
+ one solution ;; One solution
- \infty ;; negative infinity
+ -\infty ;; negative infinity
- \mathbb{R} ;; all real numbers except 0
+ \mathbb{R} ;; All real numbers.
+ all real numbers ;; \mathbb{R}
+ all real numbers ;; x \in \mathbb{R}
- all real numbers ;; \mathbb{Z}
+ DNE ;; The limit does not exist
+ March 3 ;; 3 March
+ March 3, 2020 ;; 3 March 2020
- March 3, 2020 ;; 3 March 2021
- March 3 ;; May 3
- March 3 ;; 3
- 3 ;; March 3
+ \text{March 3} ;; Mar. 3rd
+ May ;; may
- the cat ;; the dog
+ the cat ;; cat
- A B ;; B
# modulo
- 3,5 ;; 3 \pmod 5
- 3 ;; 3\mod 5
+ 3 \pmod 5 ;; 8 \pmod 5
+ x \equiv 3 \pmod{5} ;; x \equiv -2 \pmod 5
- x \equiv 3 \pmod{5} ;; x \equiv 2 \pmod 5
- x \equiv 3 \pmod{5} ;; y \equiv 3 \pmod 5
+ x \equiv 3 (mod 5) ;; x \equiv 3 \pmod 5
# matrices
+ \begin{pmatrix}1\\2\end{pmatrix} ;; (1,2)
+ \begin{pmatrix}1\\2\end{pmatrix} ;; \langle 1,2\rangle
- \begin{pmatrix}1\\2\end{pmatrix} ;; (2,1)
- \begin{pmatrix}1&2\end{pmatrix} ;; \begin{pmatrix}1\\2\end{pmatrix}
+ [[1,2],[3,4]] ;; \begin{bmatrix}1&2\\3&4\end{bmatrix}
- [[1,2],[3,4]] ;; \begin{bmatrix}1&3\\2&4\end{bmatrix}
+ \begin{pmatrix}2&4\end{pmatrix} ;; 2\begin{pmatrix}1&2\end{pmatrix}
- \begin{pmatrix}2&4\end{pmatrix} ;; 3\begin{pmatrix}1&2\end{pmatrix}
+ t\begin{pmatrix}1\\2\end{pmatrix} ;; \begin{pmatrix}t\\2t\end{pmatrix}
+ \begin{vmatrix}1&2\\3&4\end{vmatrix} ;; -2
- -2 ;; \begin{pmatrix}-2\end{pmatrix}x
+ \det\begin{pmatrix}1&2\\3&4\end{pmatrix} ;; -2
+ \begin{pmatrix}1\\0\end{pmatrix}+\begin{pmatrix}0\\1\end{pmatrix} ;; \begin{pmatrix}1\\1\end{pmatrix}
- 5 ;; 5\begin{pmatrix}1\end{pmatrix}\begin{pmatrix}1\\2\end{pmatrix}
+ \left[\begin{array}{c}1\\2\end{array}\right] ;; \begin{bmatrix}1\\2\end{bmatrix}
# families and constants
- A+B+C ;; A+B+c
+ x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z} ;; x=\frac{\pi}{4}+n\pi, n\in\mathbb{Z}
+ x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z} ;; x=\frac{\pi}{4}+k\pi
+ x=\frac{\pi}{4}+k\pi \text{ for any integer } k ;; \frac{\pi}{4}+n\pi, n \in \mathbb{Z}
- x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z} ;; x=\frac{\pi}{4}+2k\pi, k\in\mathbb{Z}
- x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z} ;; x=\frac{\pi}{4}
- x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z} ;; k\in\mathbb{Z}
- 5 ;; 5, k\in\mathbb{Z}, 6
+ \ln|x|+C ;; \ln|x|+c
- \ln|x|+C ;; \ln|x|
- \ln|x|+C ;; \ln|x|+x
- \ln|x|+C ;; \ln|x|+2
- aC ;; ab
+ y=Ce^{2x} ;; y=ce^{2x}
+ f(x)=x^2+1 ;; f(t)=1+t^2
- f(x)=x^2+1 ;; f(t)=1+x^2
- f(x)=ax ;; f(a)=a^2
# systems and alignment
+ x=1,y=2 ;; \begin{cases}x=1\\y=2\end{cases}
+ 5 ;; \begin{aligned}x&=2+3\\&=5\end{aligned}
- 5 ;; \begin{aligned}x&=5\\y&=6\end{aligned}
# angles, colour
+ 37^\circ30' ;; 37.5^\circ
+ 4 ;; \color{red}{4}
- 4 ;; \phantom{4}
+ \phi ;; \varphi
- \phi ;; \psi
+ x=\frac{\mathrm{gb}}{f} ;; \frac{bg}{f}
+ \log_{10}5 ;; \lg 5
+ \binom{n}{k} ;; {n \choose k}
+ \frac59 ;; 0.(5)
+ 0.1(6) ;; \frac16
+ x^{10}+y^{-2} ;; x¹⁰+y⁻²
- x^{10} ;; x¹+0
+ 5:3 ;; 5\text{ to }3
+ 3:00 ;; 3 p.m.
- 3 ;; 3 pm
# primes
- x^2 ;; (x^2)'
+ y^{\prime\prime} ;; y''
- y^{\prime\prime} ;; y^{\prime}
+ f'(x) ;; f^{\prime}(x)
- x_1' ;; x_1
- x_1' ;; x_2'
- y''' ;; y''
+ y''' ;; y^{\prime\prime\prime}
+ y''+y=0 ;; y''=-y
+ 179^\circ 59' 60'' ;; 180
+ \text{5 and 6} ;; 5,6
+ $5$ and $6$ ;; 6, 5
+ n\le -9 or n\ge 2:(-\infty,-9]\cup[2,\infty) ;; (-\infty,-9]\cup[2,\infty)
"""


def judge(gold, response, **settings):
    """The verdict as `grade` forms it, without the child process."""
    options, golds = MathSettings(**settings), gold_answers(gold)
    answer = graded_answer(golds, response)
    if answer is None:
        return "wrong"
    return (quick(golds, answer, options) or decide(golds, answer, options, lambda stage: None)).outcome


def cases():
    found = []
    kind = ""
    for line in TABLE.strip().splitlines():
        if line.startswith("# "):
            kind = line[2:]
            continue
        mark, rest = line.split(" ", 1)
        gold, text = rest.split(" ;; ")
        response = text.replace("⏎", "\n") if "!" in mark else rf"Hence the answer is $\boxed{{{text}}}$."
        found.append(pytest.param(gold, response, "correct" if "+" in mark else "wrong", id=f"{kind}: {rest}"))
    return found


@pytest.mark.parametrize(("gold", "response", "outcome"), cases())
def test_kind(gold, response, outcome):
    assert judge(gold, response) == outcome


@pytest.mark.parametrize(
    ("settings", "gold", "response", "outcome"),
    [
        ({"units": "required"}, "12''", "12 in", "correct"),
        ({"units": "required"}, "12''", "12", "wrong"),
        ({"intervals": "strict"}, r"(-\infty,-2)\cup(2,\infty)", "|x|>2", "wrong"),
        ({"order": "given"}, "1,2", r"\boxed{1}, \boxed{2}", "correct"),
        ({"order": "given"}, "1,2", r"\boxed{2}, \boxed{1}", "wrong"),
        ({"names": "required"}, "f(x)=x^2", "f(t)=t^2", "correct"),
    ],
)
def test_settings_of_new_kinds(settings, gold, response, outcome):
    assert judge(gold, response, **settings) == outcome


def test_boxes_side_by_side_end_with_the_response():
    assert side_by_side(r"\boxed{1} and \boxed{2}") == ["1", "2"]
    assert side_by_side(r"\boxed{1}, then \boxed{2}") == ["2"]
    assert side_by_side(r"<think>\boxed{1}</think>, \boxed{2}") == ["2"]
    assert side_by_side(r"<think>\boxed{1}, \boxed{2}") == []


def test_a_formula_nested_deeply_is_refused_before_it_is_parsed():
    start = time.perf_counter()
    for opening, closing in ((r"\sqrt{", "}"), (r"\frac{1}{", "}"), (r"\log_{", "}"), ("x^{(", ")}")):
        assert judge("x+1", rf"\boxed{{{opening * 300}5{closing * 300}}}") == "wrong"
    assert judge("x+1", rf"\boxed{{{'-' * 2000}5}}") == "wrong"
    assert time.perf_counter() - start < 2


def test_extraction_stays_linear():
    # Each would take minutes at quadratic cost.
    for text in (r"\boxed{5} and " * 60_000, "answer\n" * 60_000, "so " * 130, "Answer: $$" * 40_000, "x is " * 80):
        final_answer(text)
        side_by_side(text)


def test_the_whole_path_agrees():
    assert grade("math", "1,2", r"So $\boxed{2}$ and $\boxed{1}$.").prediction == "2, 1"
    assert grade("math", "2", r"So $\boxed{1}$ and $\boxed{2}$.").outcome == "correct"


PROSE = "The eigenvalues are $-1,-1,1$. Therefore this matrix is not diagonalizable."


@pytest.mark.parametrize(
    ("gold", "prediction", "outcome"),
    [
        (PROSE, rf"\boxed{{{PROSE}}}", "correct"),
        (PROSE, PROSE, "correct"),
        # The last sentence of several is not the answer, and what cannot be read proves nothing.
        (r"$u \times v=3$. The area is $9$.", r"\boxed{9}", "abstain"),
        (r"The solution is $z=t, y=4 t, x=2-4 t$.", r"\boxed{The solution is $z=t, y=4 t, x=2-4 t$.}", "correct"),
        (r"The solution is $z=t, y=4 t, x=2-4 t$.", r"\boxed{z=t, y=4t, x=2-4t}", "correct"),
        ("The area is $12$.", r"\boxed{12}", "correct"),
        ("The area is $12$.", r"\boxed{13}", "wrong"),
    ],
)
def test_a_gold_in_sentences_is_right_as_a_whole(gold: str, prediction: str, outcome: str) -> None:
    """What shortens a response to its last statement must not shorten a gold of several sentences."""
    assert grade("math", gold, prediction).outcome == outcome
