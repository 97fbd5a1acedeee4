-- A waiter gives up; the next in line is woken, since a wake may be lost with it (popped, but not asked with).
-- Needs: limits.
-- KEYS: 1 waiters, 2 waiters seen, 3 wake list of this episode
-- ARGV: 1 episode id, 2 wake key prefix
-- Returns: 1
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[3])
wake_first(KEYS[1], ARGV[2])
return 1
