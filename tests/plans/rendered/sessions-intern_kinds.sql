-- schema/moves/sessions.py: INTERN_KINDS
SELECT nth, intern_kind(properties, ARRAY(SELECT jsonb_array_elements_text(exclusive))) AS id
FROM unnest(CAST(string_to_array(:properties, chr(30)) AS jsonb[]), CAST(string_to_array(:exclusive, chr(30)) AS jsonb[])) WITH ORDINALITY AS k (properties, exclusive, nth)
