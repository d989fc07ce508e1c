from common.engine.scheduling.budget import StepBudget


def test_a_budget_grants_what_is_left_and_then_nothing() -> None:
    budget = StepBudget(10)
    assert [budget.grant(4), budget.grant(100), budget.grant(1)] == [4, 6, 0]
