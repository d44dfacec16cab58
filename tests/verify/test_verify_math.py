"""Mathematical answers: each kind of answer once right and once wrong, and every policy under both its settings.

Planted faults seen caught here: `_matched` ignoring multiplicity; tuples compared as sets; `same_relation` without
the sign test; percent never scaled; `final_answer` taking the first box; degrees stripped inside a formula;
constants compared to 20 digits only; full stops stripped one after the other; percent not counted among units;
symbols lowercased; bare letters multiplied; a chain's sides not compared.
"""

import pytest

from apportion.errors import InputError
from apportion.verify import check_gold, grade
from apportion.verify.extract import boxes, final_answer
from apportion.verify.math import MathSettings, decide, gold_answers, quick, unreadable_gold
from apportion.verify.normalise import canonical, normalise


def judge(gold, prediction, **settings):
    """The verdict as `grade` forms it, without the child process."""
    options = MathSettings(**settings)
    golds, answer = gold_answers(gold), final_answer(prediction)
    if answer is None:
        return "wrong"
    return (quick(golds, answer, options) or decide(golds, answer, options, lambda stage: None)).outcome


RIGHT = r"""
1/8 | \frac18
\dfrac{3}{7} | \tfrac37
\frac{\sqrt5}2 | \frac{\sqrt{5}}{2}
3.5 | 3\frac{1}{2}
7/3 | 2 1/3
0.375 | 3/8
12 | 012
12,500 | 12500
12{,}500 | 12\,500
-4 | −4
\text{27} | 27
3.2\times10^{5} | 320000
4.1e-7 | 4.1 \times 10^{-7}
0.\overline{6} | 2/3
6! | 720
\frac{1}{50!} | \frac{1}{50 \cdot 49!}
2\sqrt{7} | \sqrt{28}
\sqrt{\frac{2}{m}} | \frac{\sqrt{2}}{\sqrt{m}}
x=9 | 9
9 | x = 9
g(t)=t^2+t | t(t+1)
h(x) = 2x | h(x)=x+x
3x-6y+9=0 | y = x/2 + 3/2
y=4x-1 | 4x-y-1=0
uv=6 | v=\frac{6}{u}
(n+2)^2 | n^2+4n+4
\left( 1, \frac{\pi}{3} \right) | (1,\frac{\pi}{3})
\{4,5\} | \{5,4\}
4,5 | 5, 4
x = 4 \text{ or } x = 5 | 5,4
\pm 6 | 6,-6
2\pm\sqrt3 | 2-\sqrt{3}, 2+\sqrt{3}
[3,8) | 3 \le x < 8
x > -1 | (-1,\infty)
(-\infty,0)\cup(2,\infty) | x<0 \text{ or } x>2
\mathbb{R} | (-\infty,\infty)
x \ne 7 | (-\infty,7)\cup(7,\infty)
\begin{pmatrix}2\\9\end{pmatrix} | \begin{bmatrix}2\\9\end{bmatrix}
\begin{pmatrix}0.5&1\\0&3\end{pmatrix} | \begin{pmatrix}\frac12&1\\0&3\end{pmatrix}
9:45 | 09:45
4:15 \text{ p.m.} | 16:15
3:9 | 1:3
2,4,\ldots,2n | 2, 4, \dots, 2n
18\text{ cm}^2 | 18
18 cm | 18\text{ centimeters}
\$7.50 | 7.5
120^\circ | 120
180^\circ | \pi
\cos 60^\circ | \frac12
35\% | 0.35
35\% | 35
\text{Tuesday} | tuesday
\text{(D)} | D
212_3 | 212_{3}
\sin^2\theta+\cos^2\theta | 1
a+b+c | c+a+b
\sqrt[3]{-27} | -3
5(2) | 10
\sum_{k=1}^{n} k | \frac{n(n+1)}{2}
\sum_{n=0}^{\infty} (n+1) x^n | \sum_{k=0}^{\infty} x^k (k+1)
\sum_{n=1}^{\infty} \frac{1}{n^2} | \frac{\pi^2}{6}
f(x)=4x-7 | y = 4x-7
(2-i)^2 | 3-4i
\frac{\sqrt2}{2}+\frac{\sqrt2}{2}i | e^{i\pi/4}
x > 1 \text{ and } x < 6 | (1,6)
6>x>1 | 1<x<6
\text{2:15 PM} | 14:15
9.8\ \mathrm{m/s^2} | 9.8 m/s^2
\{x \mid x \ge 4\} | [4,\infty)
\begin{pmatrix} 7 & 1 \\ 0 & 3 \end{pmatrix} | \left[\begin{array}{cc} 7 & 1 \\ 0 & 3 \end{array}\right]
\emptyset | \{\}
5 | **5**
5 | *5*
5 | ***5***
5 | `5`
5 | __5__
5 | **5**.
5 | **$5$**
5 | $**5**$
6 | **2*3**
8 | 2**3
x^2y^3 | x**2*y**3
5 | 5.
1,2,3... | 1,2,3,\ldots
\{1,2,\ldots\} | {1,2...}
28 | 28\%
5\% | 5 percent
$ab$ | $ba$
$ab$ | ba
xy | y \cdot x
x=ab | x=ba
cat | Cat
yes | Yes
\text{(B)} | b
dog, cat | cat, dog
X+Y | Y+X
\sin x | sin(x)
\sin x | sin x
\tan x | tan(x)
\sin x\cos y | cos(y) sin(x)
\frac{\sin x}{2} | \frac{sin(x)}{2}
\arctan x | atan(x)
\sqrt x | sqrt(x)
\sqrt{x} | sqrt x
\sqrt{(x+1)(x+2)} | sqrt((x+1)(x+2))
e^x | exp(x)
|x| | abs(x)
|\sin x| | abs(sin(x))
\{3,2,1\} | {1,2,3}
{1,2,3} | \{3,2,1\}
\{(1,2),(3,4)\} | {(3,4),(1,2)}
5 | {5}
5 | = 5
x+1 | = x+1
5 | 2+3=5
5 | = 2+3 = 5
6 | 1+5=2+4=6
0.56=56\% | 0.56
(-2,2) | |x|<2
[-2,2] | 2 \ge |x|
\gamma^2-1 | (\gamma-1)(\gamma+1)
center: (1,2) | center: (1,2)
(x-1)^2=x^2-2x+1 | (x-1)^2=1-2x+x^2
"""
WRONG = r"""
9 | 9\sqrt{2}
\frac{1}{70!} | \frac{1}{72!}
\frac{1}{3^{80}} | \frac{1}{3^{81}}
2^{300} | 2^{300}+1
\frac{3^{500}+1}{2\cdot 3^{500}} | \frac{1}{2}
1 | 1+e^{-90}
0 | 0.0000001
1e-12 | 3e-12
2-\frac{1}{e} | 2+\frac{1}{e}
\pm 11 | 11
11:00 | 1:00
4:15 pm | 4:15 am
1,3,\ldots,n | 1,2,\ldots,n
1,2,\ldots,n | 1,2,n
1:3:5:\ldots | 1:8:27:\ldots
(2,\frac{\pi}{3}) | (2,\frac{2\pi}{3})
(4,5) | (5,4)
\{4,5\} | (4,5)
4,4 | 4
4,4,5 | 4,5,5
2,-3 | 2,-5
2 | 2 1/3
7 | 3 7/2
6 | m=6k
6 | 6m
h(x)=1 | \forall x<2, h(x)=1
x=9 | y=9
x=9 | 3x=27
h(x)=x^2 | k(x)=x^2
[3,8) | 3 \le x \le 8
x > -1 | x < -1
x > -1 | x \ge -1
x+y<3 | x+y>3
D=(0,2) | D=(0,2.5)
18\text{ cm} | 18\text{ km}
\$7 | €7
\cos 60^\circ | \cos 60
|x| | x
3.14 | \pi
y''=y | y'=y
\text{Aldo} | \text{Alod}
212_3 | 212_4
\begin{pmatrix}2\\9\end{pmatrix} | \begin{pmatrix}9\\2\end{pmatrix}
\begin{pmatrix} 7 & 1 \\ 0 & 3 \end{pmatrix} | \begin{pmatrix} 7 & 0 \\ 1 & 3 \end{pmatrix}
\begin{pmatrix} 7 \\ 1 \end{pmatrix} | \begin{pmatrix} 7 & 1 \end{pmatrix}
(-1,0)\cup(0,1) | (-1,1)
\infty | -\infty
\frac{1}{x-3} | \frac{1}{3-x}
\mathbb{Z} | \mathbb{R}
a+b | a-b
5 | \pm 5
\sum_{n=0}^{\infty} (n+1) x^n | \sum_{n=1}^{\infty} (n+1) x^n
8 | put it in \boxed
8 | \boxed{}
8 | 8 apples and 3 pears
123456.7 | 123456.8
1,2,3 | 1,2,3,...
1,2,3,... | 1,2,3
1,2,3 | 1,2,3...
1,2,3... | 1,2,3
0.333 | 0.333...
0.333... | 0.333
3.14 | 3.14...
3.14... | 3.14
1234 | 1,234,...
1,234,... | 1234
\{1,2,3\} | \{1,2,3...\}
\$5 | 5%
5% | \$5
5% | 5 cm
5 cm | 5%
20\% | 20^\circ
20^\circ | 20\%
\{5\%\} | \{5\text{ cm}\}
cat | act
tea | eat
dog, cat | god, act
log cabin | cabin log
x | X
2x+1 | 2X+1
X_1 | x_1
\Delta | \delta
sin(x) | sin(X)
\sin x | sin y
\sin x | cos(x)
(1,2) | {1,2}
5 | 2+4=5
5 | x+3=5
6 | 1+5=7=6
5 | =
5 | )sqrt(5
(-2,2) | |x|>2
(-2,2) | |x|<3
5 | 1/0
"""


def pairs(block):
    return [tuple(line.split(" | ")) for line in block.strip().splitlines()]


@pytest.mark.parametrize(("gold", "prediction"), pairs(RIGHT))
def test_same_answer(gold, prediction):
    assert judge(gold, prediction) == "correct"
    assert judge(gold, rf"So the result is \boxed{{{prediction}}}.") == "correct"


@pytest.mark.parametrize(("gold", "prediction"), pairs(WRONG))
def test_other_answer(gold, prediction):
    assert judge(gold, prediction) == "wrong"


@pytest.mark.parametrize("gold", sorted({gold for gold, _ in pairs(RIGHT) + pairs(WRONG)}))
def test_every_gold_is_read_and_equals_itself(gold):
    assert unreadable_gold(gold_answers(gold)) is None
    # By the trees, not by the spelling.
    settings = MathSettings()
    assert decide(gold_answers(gold), normalise(gold), settings, lambda stage: None).outcome == "correct"


@pytest.mark.parametrize(
    ("settings", "gold", "prediction", "outcome"),
    [
        ({"percent": "strict"}, r"35\%", "35", "wrong"),
        ({"percent": "sign"}, r"35\%", "0.35", "wrong"),
        ({"percent": "fraction"}, r"35\%", "35", "wrong"),
        ({"percent": "fraction"}, r"35\%", "0.35", "correct"),
        ({"units": "required"}, r"18\text{ cm}", "18", "wrong"),
        ({"units": "ignored"}, r"18\text{ cm}", r"18\text{ km}", "correct"),
        ({"intervals": "strict"}, "[3,8)", r"3 \le x < 8", "wrong"),
        ({"order": "given"}, "4,5", "5,4", "wrong"),
        ({"names": "required"}, "x=9", "9", "wrong"),
        ({"rel_tol": 1e-2}, "3.14", r"\pi", "correct"),
        ({"rel_tol": 1e-2}, "3.14e-30", "3.16e-30", "correct"),
        ({"rel_tol": 1e-2}, "3.14e-30", "3.34e-30", "wrong"),
    ],
)
def test_policies(settings, gold, prediction, outcome):
    assert judge(gold, prediction, **settings) == outcome


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(InputError, match=r"units: got 'optionall'; expected one of .*did you mean 'optional'"):
        MathSettings(units="optionall")


def test_a_word_in_a_box_is_a_word():
    assert judge("cat", r"\boxed{act}") == "wrong"
    assert judge("tea", r"\boxed{eat}") == "wrong"
    assert judge("$ab$", r"\boxed{ba}") == "correct"


@pytest.mark.parametrize("gold", [{"a": 1}, True, [True], [{"a": 1}], float("nan"), float("inf"), b"5"])
def test_a_gold_of_an_impossible_type_abstains(gold):
    verdict = grade("math", gold, "5")
    assert verdict.outcome == "abstain"
    assert "accepted are a string, a finite number, or a list of these" in verdict.reason
    assert check_gold("math", gold) == verdict.reason


@pytest.mark.parametrize("gold", [None, "", [], [None, " "]])
def test_an_empty_gold_abstains(gold):
    assert grade("math", gold, "5").reason == "the gold is empty"


@pytest.mark.parametrize("gold", ["1/0", r"\frac{1}{0}", r"\frac{x}{0}", "0/0"])
def test_a_gold_without_a_value_abstains(gold):
    assert judge(gold, "3") == "abstain"


def test_any_of_a_list_of_golds():
    assert judge([r"\frac{c}{2}", "0.5c"], "c/2") == "correct"
    assert judge(["3", "4"], "4") == "correct"
    assert judge(["3", "4"], "5") == "wrong"


def test_unreadable_gold_abstains_unless_repeated_word_for_word():
    gold = r"P(A \mid B"
    assert unreadable_gold([gold]) is not None
    assert judge(gold, "3") == "abstain"
    assert judge(gold, gold) == "correct"
    # One readable form among the accepted ones is enough.
    assert judge([gold, "3"], "4") == "wrong"


def test_an_unreadable_prediction_is_wrong_and_no_number_is_picked_out_of_it():
    assert judge("5", r"5 \foo{@") == "wrong"
    assert judge("5", "5 5") == "wrong"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> so \boxed{3}", "3"),
        (r"<think>\boxed{1}", None),
        (r"\boxed{\frac{1}{2}} and \boxed{7", r"\frac{1}{2}"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\fbox{5}", "5"),
        (r"\boxed 6.", "6"),
        ("<answer> 4/7 </answer>", "4/7"),
        (r"<answer>\boxed{9}</answer>", "9"),
        ("work\n#### 72", "72"),
        ("The final answer is 3.5. I hope it is right.", "3.5"),
        ("**Answer:** 12", "12"),
        ("The answer is $x = 4$, since x > 0.", "$x = 4$"),
        ("The answer is 3.14... at most. Yes.", "3.14... at most"),
        ("The answer is 1, 2, ... , n.", "1, 2, ... , n"),
        (r"\boxed 1,2,...", "1,2,..."),
        ("The answer isn't 5", "The answer isn't 5"),
        ("17", "17"),
        ("   ", None),
        ("no answer " * 100, None),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_extraction_is_linear_in_hostile_text():
    # Each would take minutes at quadratic cost.
    for text in (
        r"\boxed{" * 100_000,
        "answer" + " " * 300_000,
        "answer is " * 50_000,
        "<answer>" * 100_000,
        "{" * 500_000,
    ):
        final_answer(text)
    assert boxes(r"\boxed{" * 50_000 + "1}") == ["1"]


def test_canonical_spelling_keeps_what_matters():
    assert canonical("$ x ^ 2 $") == canonical("x^{2}")
    assert canonical("1 1/4") != canonical("11/4")
    assert canonical(r"\left[ 0 , 1 \right)") == "[0,1)"
