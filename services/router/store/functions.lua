#!lua name=moot_@VERSION@

-- One request is three keys with one hash tag: a hash, the packed prompt ids, a stream of committed spans whose
-- entry ids are 0-<output length after the span>. Ids are packed as little-endian uint32.
-- Every function decides everything before it writes, and its first write is one that a full server refuses:
-- once a function has written, the server no longer stops it, so nothing is ever half applied.

local HASH, PROMPT, STREAM = 1, 2, 3
local ID_BYTES = 4

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function expire(keys, ttl_ms)
  for _, key in ipairs(keys) do
    redis.call('PEXPIRE', key, ttl_ms)
  end
end

local function read_record(keys)
  return {
    redis.call('HGETALL', keys[HASH]),
    redis.call('GET', keys[PROMPT]) or '',
    redis.call('XRANGE', keys[STREAM], '-', '+'),
  }
end

local function committed_ids(keys)
  local parts = {}
  for _, entry in ipairs(redis.call('XRANGE', keys[STREAM], '-', '+')) do
    parts[#parts + 1] = entry[2][2]
  end
  return table.concat(parts)
end

local function append_span(keys, length_after, ids)
  if #ids > 0 then
    redis.call('XADD', keys[STREAM], '0-' .. length_after, 'ids', ids)
  end
end

-- A span as fields of the hash: what makes the same commit, sent again, recognisable.
local function span_fields(from, ids, finish, lease_ms)
  return {
    'length', from + #ids / ID_BYTES, 'span_from', from, 'span', ids, 'finish', finish,
    'state', finish == '' and 'running' or 'done', 'lease_until', now_ms() + lease_ms,
  }
end

local function whole(args)
  local record = {
    epoch = tonumber(args[1]), owner = args[2], lease_ms = tonumber(args[3]), ttl_ms = tonumber(args[4]),
    finish = args[5], prompt = args[6], ids = args[7], fields = {},
  }
  for index = 8, #args do
    record.fields[#record.fields + 1] = args[index]
  end
  return record
end

local function write_whole(keys, record)
  local fields = span_fields(0, record.ids, record.finish, record.lease_ms)
  for _, value in ipairs(record.fields) do
    fields[#fields + 1] = value
  end
  redis.call('HSET', keys[HASH], 'epoch', record.epoch, 'owner', record.owner, 'claim', '', unpack(fields))
  redis.call('SET', keys[PROMPT], record.prompt)
  redis.call('DEL', keys[STREAM])
  append_span(keys, #record.ids / ID_BYTES, record.ids)
  expire(keys, record.ttl_ms)
end

-- args: epoch, owner, lease_ms, ttl_ms, finish, prompt, ids, field, value, ...
local function create(keys, args)
  local record = whole(args)
  local seen = redis.call('HMGET', keys[HASH], 'epoch', 'owner', 'length')
  if seen[1] then
    local same = tonumber(seen[1]) == record.epoch and seen[2] == record.owner
    return {same and tonumber(seen[3]) == #record.ids / ID_BYTES and 'DUP' or 'CONFLICT', tonumber(seen[3])}
  end
  write_whole(keys, record)
  return {'OK', #record.ids / ID_BYTES}
end

-- Whether the last span, or its end (a repair makes one span of several), is `ids` from `expected` on.
local function ends_with(seen, expected, ids)
  local length, from, span = tonumber(seen[2]), tonumber(seen[4]), seen[5]
  return expected >= from and expected + #ids / ID_BYTES == length and span:sub((expected - from) * ID_BYTES + 1) == ids
end

-- args: epoch, expected length, ids, lease_ms, ttl_ms, finish
local function commit(keys, args)
  local epoch, expected, ids, finish = tonumber(args[1]), tonumber(args[2]), args[3], args[6]
  local seen = redis.call('HMGET', keys[HASH], 'epoch', 'length', 'state', 'span_from', 'span', 'finish')
  if not seen[1] then
    return {'MISSING', 0}
  end
  local length = tonumber(seen[2])
  if tonumber(seen[1]) > epoch then
    return {'FENCED', length}
  end
  if tonumber(seen[1]) < epoch then
    -- The server lost a claim (a restart, a failover): its record is older than this owner.
    return {'CONFLICT', length}
  end
  if seen[6] == finish and ends_with(seen, expected, ids) then
    return {'DUP', length}
  end
  if seen[3] == 'done' then
    return {'TERMINAL', length}
  end
  if length ~= expected then
    return {'CONFLICT', length}
  end
  local length_after = length + #ids / ID_BYTES
  redis.call('HSET', keys[HASH], unpack(span_fields(length, ids, finish, tonumber(args[4]))))
  append_span(keys, length_after, ids)
  expire(keys, tonumber(args[5]))
  return {'OK', length_after}
end

-- Make the record what its owner holds: after an outage, a flush, a lost second of the append-only file.
-- args as for create
local function repair(keys, args)
  local record = whole(args)
  local total = #record.ids / ID_BYTES
  local seen = redis.call('HMGET', keys[HASH], 'epoch', 'length', 'state', 'finish')
  if not seen[1] then
    write_whole(keys, record)
    return {'OK', total}
  end
  local epoch, length = tonumber(seen[1]), tonumber(seen[2])
  if epoch > record.epoch then
    return {'FENCED', length}
  end
  if epoch < record.epoch then
    write_whole(keys, record)
    return {'OK', total}
  end
  local committed = committed_ids(keys)
  local agrees = #committed == length * ID_BYTES and record.ids:sub(1, #committed) == committed
  if seen[3] == 'done' then
    return {agrees and length == total and seen[4] == record.finish and 'DUP' or 'TERMINAL', length}
  end
  if not agrees then
    return {'CONFLICT', length}
  end
  local tail = record.ids:sub(#committed + 1)
  redis.call('HSET', keys[HASH], unpack(span_fields(length, tail, record.finish, record.lease_ms)))
  redis.call('SET', keys[PROMPT], record.prompt)
  append_span(keys, total, tail)
  expire(keys, record.ttl_ms)
  return {'OK', total}
end

-- args: owner, claim id (new for every claim, the same when it is sent again), lease_ms, ttl_ms
local function claim(keys, args)
  local seen = redis.call('HMGET', keys[HASH], 'epoch', 'state', 'claim', 'lease_until')
  if not seen[1] then
    return {'MISSING', 0}
  end
  if seen[3] == args[2] then
    return {'DUP', 0, read_record(keys)}
  end
  if seen[2] == 'done' then
    return {'TERMINAL', 0}
  end
  local now = now_ms()
  local left = tonumber(seen[4]) - now
  if left > 0 then
    return {'HELD', left}
  end
  redis.call('HSET', keys[HASH], 'epoch', tonumber(seen[1]) + 1, 'owner', args[1], 'claim', args[2],
    'lease_until', now + tonumber(args[3]))
  expire(keys, tonumber(args[4]))
  return {'OK', 0, read_record(keys)}
end

-- args: epoch, lease_ms, ttl_ms
local function renew(keys, args)
  local seen = redis.call('HMGET', keys[HASH], 'epoch', 'state')
  if not seen[1] then
    return {'MISSING', 0}
  end
  if tonumber(seen[1]) ~= tonumber(args[1]) then
    return {tonumber(seen[1]) > tonumber(args[1]) and 'FENCED' or 'CONFLICT', 0}
  end
  if seen[2] == 'done' then
    return {'TERMINAL', 0}
  end
  redis.call('HSET', keys[HASH], 'lease_until', now_ms() + tonumber(args[2]))
  expire(keys, tonumber(args[3]))
  return {'OK', 0}
end

-- End a request from outside; its owner learns it with the next commit. args: ttl_ms
local function cancel(keys, args)
  local seen = redis.call('HMGET', keys[HASH], 'state', 'length')
  if not seen[1] then
    return {'MISSING', 0}
  end
  if seen[1] == 'done' then
    return {'TERMINAL', tonumber(seen[2])}
  end
  redis.call('HSET', keys[HASH], 'state', 'done', 'finish', 'abort')
  expire(keys, tonumber(args[1]))
  return {'OK', tonumber(seen[2])}
end

local function load(keys)
  return {'OK', 0, read_record(keys)}
end

redis.register_function('moot_create_@VERSION@', create)
redis.register_function('moot_commit_@VERSION@', commit)
redis.register_function('moot_repair_@VERSION@', repair)
redis.register_function('moot_claim_@VERSION@', claim)
redis.register_function('moot_renew_@VERSION@', renew)
redis.register_function('moot_cancel_@VERSION@', cancel)
redis.register_function{function_name = 'moot_load_@VERSION@', callback = load, flags = {'no-writes'}}
