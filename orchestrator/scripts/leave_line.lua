-- A waiter gives up; the next in line is woken, since a wake may be lost with it (popped, but not asked with).
-- A wake too many costs one question.
-- KEYS: 1 waiters, 2 waiters seen, 3 wake list of this episode
-- ARGV: 1 episode id, 2 wake key prefix
-- Returns: 1
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[3])
for _, waiter in ipairs(redis.call('ZRANGE', KEYS[1], 0, 0)) do
  redis.call('LPUSH', ARGV[2] .. waiter, '1')
  redis.call('EXPIRE', ARGV[2] .. waiter, 60)
end
return 1
