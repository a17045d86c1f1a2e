-- Return the nodes of a graph in an order in which they can run, and the depth of each. Raises LH002 for a cycle.
--
-- Nodes are numbered by their positions in `nos`; `parents` and `children` are the edges, sorted by parent. Each edge
-- is followed once. Nodes that remain wait for each other: following parents from any of them ends in the cycle that
-- the error names.
CREATE OR REPLACE FUNCTION ordered_graph(job_name text, nos integer[], parents integer[], children integer[],
    OUT places integer[], OUT depths integer[])
LANGUAGE plpgsql AS $$
DECLARE
    nodes integer := cardinality(nos);
    edges integer := cardinality(parents);
    waits integer[] := array_fill(0, ARRAY[nodes]);
    first integer[] := array_fill(0, ARRAY[nodes]);
    via integer[] := array_fill(0, ARRAY[nodes]);
    circle integer[] := '{}';
    head integer := 1;
    tail integer := 0;
    edge integer;
    node integer;
    child integer;
    left_out integer;
BEGIN
    places := array_fill(0, ARRAY[nodes]);
    depths := array_fill(0, ARRAY[nodes]);
    FOR edge IN REVERSE edges..1 LOOP
        first[parents[edge]] := edge;
        waits[children[edge]] := waits[children[edge]] + 1;
    END LOOP;
    FOR node IN 1..nodes LOOP
        IF waits[node] = 0 THEN
            tail := tail + 1;
            places[tail] := node;
        END IF;
    END LOOP;
    WHILE head <= tail LOOP
        node := places[head];
        head := head + 1;
        edge := first[node];
        WHILE edge > 0 AND edge <= edges AND parents[edge] = node LOOP
            child := children[edge];
            depths[child] := greatest(depths[child], depths[node] + 1);
            waits[child] := waits[child] - 1;
            IF waits[child] = 0 THEN
                tail := tail + 1;
                places[tail] := child;
            END IF;
            edge := edge + 1;
        END LOOP;
    END LOOP;
    IF tail = nodes THEN
        RETURN;
    END IF;
    FOR edge IN REVERSE edges..1 LOOP
        IF waits[parents[edge]] > 0 AND waits[children[edge]] > 0 THEN
            via[children[edge]] := parents[edge];
        END IF;
    END LOOP;
    SELECT min(left_over.place) INTO node FROM unnest(waits) WITH ORDINALITY AS left_over (count, place)
        WHERE left_over.count > 0;
    WHILE waits[node] > 0 LOOP
        waits[node] := 0;
        circle := circle || node;
        node := via[node];
    END LOOP;
    circle := circle[array_position(circle, node):];
    edge := array_position(circle, (SELECT min(place) FROM unnest(circle) place));
    circle := circle[edge:] || circle[1:edge];
    -- A long circle is named by its first ten nodes and its last three.
    left_out := cardinality(circle) - 13;
    RAISE EXCEPTION 'Circular dependency detected in job %: %', job_name, (
        SELECT string_agg(CASE WHEN c.nth = 11 AND left_out > 1 THEN format('… %s more …', left_out)
                ELSE nos[c.place]::text END, ' → ' ORDER BY c.nth)
            FROM unnest(circle) WITH ORDINALITY c (place, nth)
            WHERE left_out <= 1 OR c.nth <= 11 OR c.nth > cardinality(circle) - 3)
        USING ERRCODE = 'LH002';
END $$;
