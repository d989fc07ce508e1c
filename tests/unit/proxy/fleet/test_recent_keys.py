from proxy.fleet.recent_keys import RecentKeys


def test_the_least_recently_used_key_is_forgotten_first() -> None:
    keys = RecentKeys(2)
    keys.add(1)
    keys.add(2)
    assert 1 in keys
    keys.add(3)
    assert [key in keys for key in (1, 2, 3)] == [True, False, True]
    keys.clear()
    assert 1 not in keys
