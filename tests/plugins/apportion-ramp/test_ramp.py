import pytest
from apportion_ramp import Ramp

from apportion.testing import LAWS


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("slope", [0.5, -1.0])
def test_ramp(slope, law):
    law(Ramp(slope=slope))
