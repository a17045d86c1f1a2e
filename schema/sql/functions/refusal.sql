-- Return why a value is refused as a field of a request, null if it is accepted.
--
-- The words are those of the checks in `schema/requests.py`. The answer begins with the path below the field, as in
-- `.0: input should be …`, or with the colon. `at_least` and `at_most` bound a number, the length of a list, or a text:
-- its characters from below, its bytes from above. Short values that are plainly correct are accepted by single
-- expressions, because a query inside a function costs ten times as much.
CREATE OR REPLACE FUNCTION refusal(kind text, at_least numeric, at_most numeric, given jsonb)
RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    given_type text := jsonb_typeof(given);
    content text := given #>> '{}';
    size bigint;
    found text;
BEGIN
    CASE kind
    WHEN 'boolean' THEN
        RETURN CASE WHEN given_type <> 'boolean' THEN ': input should be a valid boolean' END;
    WHEN 'integer' THEN
        IF given_type <> 'number' OR content !~ '^-?\d+$' THEN
            RETURN ': input should be a valid integer';
        END IF;
    WHEN 'number', 'positive' THEN
        IF given_type <> 'number' THEN
            RETURN ': input should be a valid number';
        ELSIF kind = 'positive' AND content::numeric <= 0 THEN
            RETURN ': input should be greater than 0';
        END IF;
    WHEN 'text', 'name', 'lock', 'zone', 'time' THEN
        IF given_type <> 'string' THEN
            RETURN ': input should be a valid string';
        ELSIF kind = 'name' AND content !~ '^[a-z0-9][a-z0-9._-]{0,62}$' THEN
            RETURN ': is not a name: use a-z, 0-9, ''.'', ''_'', ''-'', at most 63';
        ELSIF kind = 'lock' AND content !~ '^[a-z0-9][a-z0-9._-]{0,62}(:[1-9][0-9]{0,8})?$' THEN
            RETURN ': is neither a lock nor LOCK:SLOTS: use a-z, 0-9, ''.'', ''_'', ''-'', at most 63';
        ELSIF kind = 'zone' AND content <> 'UTC' AND NOT EXISTS (
                SELECT FROM pg_timezone_names z WHERE z.name = content AND z.name !~ '^(posix|right)') THEN
            RETURN format(': ''%s'' is not a time zone: use a name such as ''UTC'' or ''Europe/Berlin''',
                regexp_replace(left(content, 60), '[^ -~]', '?', 'g'));
        ELSIF kind = 'time' THEN
            IF content !~ ('^[12]\d{3}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[T ]([01]\d|2[0-3]):[0-5]\d'
                        || '(:[0-5]\d(\.\d{1,6})?)?(Z|[+-](0\d|1[0-4]):[0-5]\d)$')
                    OR substr(content, 9, 2)::integer > date_part('day', (left(content, 7) || '-01')::timestamp
                        + interval '1 month - 1 day') THEN
                RETURN ': is not a time with an offset, such as 2026-12-01T10:00:00+01:00';
            ELSIF content::timestamptz > now() + interval '365 days' THEN
                RETURN ': must be at most a year ahead';
            END IF;
        ELSIF char_length(content) < at_least THEN
            RETURN format(': string should have at least %s character', at_least);
        ELSIF octet_length(content) > at_most THEN
            RETURN format(': is %s bytes long, at most %s are allowed', octet_length(content), at_most);
        END IF;
        RETURN NULL;
    WHEN 'on_failure', 'on_phantom', 'on_conflict' THEN
        IF given_type <> 'string' OR content <> ALL (CASE kind WHEN 'on_failure' THEN '{block,run,cancel}'::text[]
                WHEN 'on_conflict' THEN '{join,replace,refuse}' ELSE '{warn,reject,ignore}' END) THEN
            RETURN CASE kind WHEN 'on_failure' THEN ': input should be ''block'', ''run'' or ''cancel'''
                WHEN 'on_conflict' THEN ': input should be ''join'', ''replace'' or ''refuse'''
                ELSE ': input should be ''warn'', ''reject'' or ''ignore''' END;
        END IF;
        RETURN NULL;
    WHEN 'parent' THEN
        IF given_type = 'number' AND content ~ '^-?\d+$' THEN
            RETURN '.node' || refusal('integer', 0, 2147483647, given);
        ELSIF given_type <> 'object' THEN
            RETURN ': input should be an object';
        ELSIF given->'node' IS NULL THEN
            RETURN '.node: field required';
        END IF;
        RETURN coalesce('.node' || refusal('integer', 0, 2147483647, given->'node'),
            CASE WHEN given->>'on_failure' IS NOT NULL THEN
                '.on_failure' || refusal('on_failure', NULL, NULL, given->'on_failure') END,
            (SELECT format('.%s: there is no such field', regexp_replace(left(k, 60), '[^ -~]', '?', 'g'))
             FROM jsonb_object_keys(given) k WHERE k NOT IN ('node', 'on_failure') LIMIT 1));
    WHEN 'command', 'locks', 'hours', 'texts', 'codes', 'parents', 'nodes' THEN
        IF given_type <> 'array' THEN
            RETURN ': input should be a valid list';
        END IF;
        size := jsonb_array_length(given);
        IF size < at_least THEN
            RETURN format(': list should have at least %s item after validation, not %s', at_least, size);
        ELSIF size > at_most THEN
            RETURN format(': list should have at most %s items after validation, not %s', at_most, size);
        END IF;
        IF kind = 'command' AND octet_length(given::text) <= 262144 AND given->>0 <> ''
                AND NOT jsonb_path_exists(given, 'strict $[*] ? (@.type() <> "string")')
            OR kind = 'locks' AND NOT jsonb_path_exists(given, 'strict $[*] ? (@.type() <> "string"
                || !(@ like_regex "^[a-z0-9][a-z0-9._-]{0,62}(:[1-9][0-9]{0,8})?$"))') THEN
            RETURN NULL;
        END IF;
        SELECT '.' || c.nth || c.refused INTO found FROM (
            SELECT e.nth - 1 AS nth, CASE kind WHEN 'command' THEN refusal('text', NULL, NULL, e.value)
                WHEN 'locks' THEN refusal('lock', NULL, NULL, e.value)
                WHEN 'hours' THEN refusal('integer', 0, 23, e.value)
                WHEN 'texts' THEN refusal('text', NULL, NULL, e.value)
                WHEN 'codes' THEN refusal('integer', 1, 255, e.value)
                WHEN 'parents' THEN refusal('parent', NULL, NULL, e.value) END AS refused
            FROM jsonb_array_elements(given) WITH ORDINALITY e (value, nth)) c
        WHERE c.refused IS NOT NULL ORDER BY c.nth LIMIT 1;
        IF found IS NULL AND kind = 'command' THEN
            SELECT CASE WHEN given->>0 = '' THEN ': must name a program' ELSE (
                SELECT refusal('text', NULL, 262144, e) FROM jsonb_array_elements(given) e
                WHERE octet_length(e #>> '{}') > 262144 LIMIT 1) END INTO found;
        ELSIF found IS NULL AND kind = 'texts' THEN
            SELECT refusal('text', NULL, 64, e) INTO found FROM jsonb_array_elements(given) e
                WHERE octet_length(e #>> '{}') > 64 LIMIT 1;
        ELSIF found IS NULL AND kind = 'parents' THEN
            SELECT format(': names node %s %s times', p.node, p.times) INTO found FROM (
                SELECT coalesce(e.value->>'node', e.value #>> '{}') AS node, count(*) AS times, min(e.nth) AS nth
                FROM jsonb_array_elements(given) WITH ORDINALITY e (value, nth) GROUP BY 1) p
            WHERE p.times > 1 ORDER BY p.times DESC, p.nth LIMIT 1;
        END IF;
        RETURN found;
    WHEN 'metadata' THEN
        IF given_type <> 'object' THEN
            RETURN ': input should be an object';
        END IF;
        SELECT count(*) INTO size FROM jsonb_object_keys(given);
        SELECT m.refused INTO found FROM (
            SELECT e.key, CASE
                WHEN jsonb_typeof(e.value) <> 'string' THEN 1
                WHEN size > at_most THEN 2
                WHEN e.key !~ '^[A-Za-z0-9_.:/-]{1,64}$' THEN 3
                WHEN octet_length(e.value #>> '{}') > 256 THEN 4 ELSE 5 END AS step, CASE
                WHEN jsonb_typeof(e.value) <> 'string' THEN
                    format('.%s: input should be a valid string', regexp_replace(left(e.key, 60), '[^ -~]', '?', 'g'))
                WHEN size > at_most THEN format(': has %s keys, at most %s are allowed', size, at_most)
                WHEN e.key !~ '^[A-Za-z0-9_.:/-]{1,64}$' THEN
                    format(': ''%s'' is not a key: use A-Z, a-z, 0-9 and _.:/-, at most 64',
                        CASE WHEN length(e.key) > 80 THEN left(e.key, 79) || '…' ELSE e.key END)
                WHEN octet_length(e.value #>> '{}') > 256 THEN format('.%s: is %s bytes long, at most 256 are allowed',
                    e.key, octet_length(e.value #>> '{}'))
                WHEN e.key = 'traceparent' AND (e.value #>> '{}' !~ ('^[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}'
                        || '-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?$')
                    OR left(e.value #>> '{}', 2) = 'ff'
                    OR left(e.value #>> '{}', 2) = '00' AND length(e.value #>> '{}') > 55) THEN
                    '.traceparent: is not a traceparent as W3C Trace Context defines it' END AS refused
            FROM jsonb_each(given) e) m
        WHERE m.refused IS NOT NULL ORDER BY m.step, m.key COLLATE "C" LIMIT 1;
        RETURN found;
    WHEN 'retry' THEN
        IF given_type <> 'object' THEN
            RETURN ': input should be an object';
        END IF;
        SELECT '.' || regexp_replace(left(coalesce(f.name, e.key), 60), '[^ -~]', '?', 'g') || c.refused INTO found
            FROM jsonb_each(given) e LEFT JOIN (VALUES
                (1, 'base', 'positive', NULL, 31536000), (2, 'factor', 'number', 1, 100),
                (3, 'cap', 'positive', NULL, 31536000), (4, 'jitter', 'number', 0, 1),
                (5, 'exceptions', 'texts', NULL, 20), (6, 'exit_codes', 'codes', NULL, 20)
            ) AS f (nth, name, kind, at_least, at_most) ON f.name = e.key
            CROSS JOIN LATERAL (SELECT CASE WHEN f.name IS NULL THEN ': there is no such field'
                ELSE refusal(f.kind, f.at_least, f.at_most, e.value) END AS refused) c
            WHERE c.refused IS NOT NULL ORDER BY f.nth, e.key COLLATE "C" LIMIT 1;
        RETURN found;
    WHEN 'env', 'properties', 'resources' THEN
        IF given_type <> 'object' THEN
            RETURN ': input should be an object';
        END IF;
        -- A text of at most 600 bytes has neither 65 keys nor a value that is too long.
        IF octet_length(given::text) <= 600 AND NOT given ? '' AND given::text NOT LIKE '%[]%' AND (
                kind = 'env' AND given::text NOT LIKE '%=%'
                    AND NOT jsonb_path_exists(given, 'strict $.* ? (@.type() <> "string")')
                OR kind = 'properties' AND NOT jsonb_path_exists(given, '$.* ? (@.type() <> "string" || @ == "")')) THEN
            RETURN NULL;
        END IF;
        SELECT CASE WHEN kind = 'resources' OR c.refused NOT LIKE ': ''%' THEN
                '.' || regexp_replace(left(c.key, 60), '[^ -~]', '?', 'g') ELSE '' END || c.refused INTO found FROM (
            SELECT e.key, CASE kind
                WHEN 'env' THEN refusal('text', NULL, NULL, e.value)
                WHEN 'properties' THEN CASE WHEN jsonb_typeof(e.value) NOT IN ('string', 'array')
                    OR jsonb_path_exists(e.value, 'strict $[*] ? (@.type() <> "string")', silent => true)
                    THEN '.str: input should be a valid string' END
                ELSE CASE WHEN e.key NOT IN ('cpu_milli', 'memory_mib', 'disk_mib', 'gpu_milli', 'gpus')
                    THEN '.[key]: input should be ''cpu_milli'', ''memory_mib'', ''disk_mib'', ''gpu_milli'' or ''gpus'''
                    ELSE refusal('integer', 1, 1000000000000, e.value) END
                END AS refused
            FROM jsonb_each(given) e) c
        WHERE c.refused IS NOT NULL ORDER BY c.key COLLATE "C" LIMIT 1;
        IF found IS NOT NULL OR kind = 'resources' THEN
            RETURN found;
        ELSIF kind = 'env' THEN
            SELECT coalesce(
                min(format(': ''%s'' is not the name of a variable',
                    regexp_replace(left(e.key, 60), '[^ -~]', '?', 'g'))) FILTER (WHERE e.key = '' OR e.key LIKE '%=%'),
                min(format(': is %s bytes long, at most 262144 are allowed', s.size)) FILTER (WHERE s.size > 262144))
                INTO found
                FROM jsonb_each_text(given) e
                CROSS JOIN LATERAL (SELECT greatest(octet_length(e.key), octet_length(e.value)) AS size) s;
            RETURN found;
        END IF;
        SELECT count(*) INTO size FROM jsonb_object_keys(given);
        IF size > 64 THEN
            RETURN format(': has %s keys, at most 64 are allowed', size);
        END IF;
        SELECT '.' || regexp_replace(left(p.key, 60), '[^ -~]', '?', 'g') || CASE
                WHEN p.has_empty THEN ': key and values must not be empty'
                ELSE format(': is %s bytes long, at most 1024 are allowed', p.size) END
            INTO found FROM (
                SELECT e.key, e.key = '' OR e.value IN ('[]', '""') OR e.value @> '[""]' AS has_empty,
                    octet_length(e.key || (SELECT coalesce(string_agg(v #>> '{}', ''), '')
                                           FROM jsonb_path_query(e.value, '$[*]') v)) AS size
                FROM jsonb_each(given) e) p
            WHERE p.has_empty OR p.size > 1024 ORDER BY p.key COLLATE "C" LIMIT 1;
        RETURN found;
    END CASE;
    RETURN CASE WHEN content::numeric < at_least THEN format(': input should be greater than or equal to %s', at_least)
        WHEN content::numeric > at_most THEN format(': input should be less than or equal to %s', at_most) END;
END $$;
