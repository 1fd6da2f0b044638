"""The held-out side: realistic names, items and sentences that training never sees.

`train.py` only uses `forbidden_words()`, to reject a made-up word that is equal to a held-out word. Only `make_data.py`
uses the sentences.
"""

from __future__ import annotations

from orders import listed
from sentences import words_of

FIRST_NAMES = listed(
    """Maria Johan Aisha Kenji Oluwaseun Ingrid Mateusz Priya Tomás Chloé Dmitri Fatima Giulia Henrik Ifeoma Jasper
    Katarzyna Lorenzo Mirela Nadia Oskar Paloma Quentin Rosalind Siobhán Thaddeus Ursula Viktor Wilhelmina Xavier Yusuf
    Zoë Alejandro Beatriz Cormac Daphne Emilio Freya Gustav Hannah Isabel Jürgen Kwame Liesel Malik Noor Ottilie Petra
    Ruben Sofía Tariq Valentina Wojciech Yolanda Zainab André Bronwyn Cedric Deepika Esther François Gwendolyn Hiroshi
    Imogen Jelena Klaus Ludmila Marcus Nikolaj Octavia Patrick Renée Stefan Theresa Umberto Violet Walter Ximena Yvonne
    Astrid Björn Clarissa Dorothy Edmund Florian Graciela Harriet Iskander Josephine Kieran Leopold Margaret Nathaniel
    Ophelia Philippa Rashid Sebastian Tabitha Veronica Winston Zachary"""
)
LAST_NAMES = listed(
    """Lindqvist Okafor Haddad Nakamura Fernández Kowalski Bergström Venkatesan Moreau Castellano Petrov Schneider
    Abernathy Bjornstad Carmichael Delacroix Eriksson Featherstone Gallagher Hashimoto Ibrahim Jankowski Kaplan Lombardi
    MacAllister Novák Olofsson Papadopoulos Quigley Rasmussen Szymański Thornbury Underwood Vasquez Whitfield Yamamoto
    Zimmermann Achebe Brennan Christodoulou Dubois Engström Fitzgerald Guðmundsson Hernández Ivanova Jørgensen Kjeldsen
    Leclerc Mbeki Nguyen O'Connor O'Brien Pereira Rosenthal Santos Takahashi Ulrich Vandermeer Winterbourne Yılmaz
    Zhang Almeida Baptiste Chaudhry Dragomir Estrada Fairweather Grünwald Holmström Iwasaki Kovács Livingstone Müller
    Nordahl Oyelaran Popescu Rutherford Stavros Tanaka Voss Weatherby Ashworth Birkeland Crawford Duarte Hawthorne
    Kensington Macdonald Pemberton Radcliffe Sutherland Treadwell Vaughan"""
)
COMPOUND_NAMES = (
    "Anne-Marie Dubois", "Jean-Luc Moreau", "Ludwig van den Bosch", "Charlotte de Vries", "Otto von Habsburg",
    "Maria del Carmen Ruiz", "J. P. Moreau", "H. Featherstone", "Eleanor J. Whitfield", "Karl-Heinz Grünwald",
    "Mary Ellen Carmichael", "Li Wei Zhang", "Ana Lucía Fernández", "Pieter van der Meulen", "Sinéad O'Connor",
    "Ravi K. Venkatesan", "Beatriz Santos-Almeida", "Fiona Ashworth-Vaughan", "Leonardo da Silva", "Yusuf al-Rashid",
    "Brightwater Bakery", "Copper Kettle Café", "Nordahl & Eriksson", "Saint Brigid Primary", "Willow Lane Library",
    "Harrington Ltd", "Petrov Brothers", "Evergreen Yoga Studio", "The Velvet Tearoom", "Sunnyside Nursery",
    "Castellano GmbH", "Museum of Clocks", "Lighthouse Theatre Group", "Bergström AB", "Kowalski Brewing Co.",
    "Oyelaran Partners", "Rosenthal Gallery", "Foxglove Farm", "Thornbury Veterinary Clinic", "Maple Grove School",
)  # fmt: skip
_ITEM_LIST = """
    oak bookshelves; walnut desks; wool blankets; ceramic mugs; linen curtains; bamboo cutting boards;
    candle holders; silk scarves; copper kettles; leather wallets; cotton towels; garden gnomes; folding
    umbrellas; porcelain vases; wicker baskets; espresso machines; laptop stands; wireless keyboards;
    ergonomic mice; USB-C cables; HDMI adapters; whiteboard markers; sticky notes; A4 notebooks;
    fountain pens; staplers; desk lamps; office swivel seats; printer cartridges; paper shredders; M8
    hex bolts; wood screws; drill bits; safety goggles; work gloves; paint brushes; ladders; hammers;
    screwdriver cases; extension cords; LED bulbs; smoke detectors; door handles; brass hinges; loaves
    of sourdough; cartons of oat cream; crates of apples; punnets of strawberries; wheels of gouda;
    kilos of almonds; bunches of tulips; bouquets of roses; sacks of potatoes; trays of lasagne;
    blueberry muffins; cinnamon buns; wedding cakes; chocolate truffles; almond croissants; vegan
    sandwiches; fruit platters; pumpkin pies; tubs of ice cream; bars of nougat; packets of cardamom;
    cans of chickpeas; flasks of olive oil; honeycomb slabs; ginger cookies; tennis rackets; yoga mats;
    football jerseys; bicycle helmets; camping tents; sleeping pads; hiking boots; rain jackets;
    swimming trunks; snow shovels; fishing rods; picnic hampers; chess boards; jigsaw puzzles; teddy
    bears; wooden trains; watercolour sketchbooks; acoustic guitars; violin strings; microphone cradles;
    choir robes; concert posters; hymnals; hospital gowns; stethoscopes; bandages; thermometers; face
    masks; hand-knitted sweaters; stainless-steel thermoses; noise-cancelling headphones; king-size
    duvets; double-glazed windows; gluten-free baguettes; 10-inch skillets; 5-litre paint buckets; 3mm
    plywood panels; 60W soldering irons; T-shirts; X-ray aprons; crème brûlée ramekins; piñatas;
    jalapeño relish; navy velvet cushions; turquoise ceramic bowls; crimson theatre drapes; antique
    mahogany mirrors; hand-painted wooden ornaments; recycled cardboard mailers; Persian rugs; Swiss
    army knives; Bluetooth speakers; Turkish coffee grinders; Dutch oven lids; Christmas wreaths;
    Halloween lanterns; rechargeable AA batteries; solar panels; garden hoses; terracotta planters;
    lavender seedlings; rosemary shrubs; sunflower seeds; birdhouses; beehives; dog collars; cat
    hammocks; aquarium filters; hamster wheels; raincoats; aprons; teapots; hourglasses; bookends;
    compasses; sundials; tripods; kaleidoscopes; trombones; harmonicas; marbles; dominoes; ukuleles;
    binoculars
"""
ITEMS = tuple(" ".join(item.split()) for item in _ITEM_LIST.split(";"))
# Words so common that both sides need them; everything else in a name or an item is held out.
SHARED_WORDS = frozenset(
    listed("of and the a with in de da del van der von den al ab co ltd gmbh group partners clinic school")
)


def forbidden_words() -> frozenset[str]:
    """Return every word of a held-out name or item. Training texts must not contain these words, in any case."""
    texts = (*FIRST_NAMES, *LAST_NAMES, *COMPOUND_NAMES, *ITEMS)
    words = frozenset(word for text in texts for word in words_of(text))
    return frozenset(word for word in words - SHARED_WORDS if len(word) > 2)


TEMPLATES = (
    "{name} ordered {qty} {item} and needs them delivered by {due}.",
    "{name} would like to order {qty} {item}, to arrive no later than {due}. Thank you!",
    "Please send {qty} {item} to {name} before {due}; the order number is {ref}.",
    "Hi, this is {name}. Could you put me down for {qty} {item}? I need them by {due}.",
    "Good morning, I'd like {qty} {item} for {due}, please. Kind regards, {name}",
    "On {date2} we received an order from {name} for {qty} {item}, due on {due}.",
    "Order {ref}: {name} wants {qty} {item}, delivery by {due}.",
    "By {due}, {name} must have {qty} {item}.",
    "We have just taken a call from {name}, who is asking for {qty} {item} by {due}. Call back on {phone}.",
    "{name} has requested {qty} {item}. The due date is {due}.",
    "{qty} {item} for {name}, please, no later than {due}.",
    "My name is {name} and I am looking for {qty} {item}. The deadline is {due}.",
    "{name} placed an order on {date2} for {qty} {item}; everything has to arrive by {due}.",
    "Dear team, {name} needs {qty} {item} by {due}. The agreed price is {price}.",
    "Customer: {name}. Product: {item}. Quantity: {digits}. Needed by: {due}.",
    "Order date {date2}, customer {name}, item {item}, quantity {digits}, due {due}.",
    "Hello! I am {name}, I would like {qty} {item} at {price} each, and please deliver them by {due}.",
    "Could {name} get {qty} {item} by {due}?",
    "For {name}: {qty} {item}, to be delivered on {due}. Phone {phone}.",
    "It's {name} again. This time we need {qty} {item} by {due}, same address as before.",
    "{name} emailed on {date2} asking for {qty} {item}. They are due on {due}.",
    "Reminder: {name} expects {qty} {item} on {due}.",
    "I spoke to {name} this morning. They want {qty} {item} before {due}.",
    "Please reserve {qty} {item} for {name}, who will collect them on {due}.",
    "Please reserve {qty} {item} in the name of {name} until {due}.",
    "{name} bought {qty} {item} for {price}, delivery is due on {due}.",
    "We need {qty} {item} by {due}. Best regards, {name}",
    "I want to buy {qty} {item} and I need them no later than {due}. My phone number is {phone}. Thanks, {name}",
    "The customer, {name}, has ordered {qty} {item} to be shipped by {due}.",
    "New order from {name}: {qty} {item}. Due: {due}.",
    "New order ({ref}) from {name}: {digits} x {item}, due {due}.",
    "Purchase order {ref} of {date2}: {digits} x {item} for {name}, to be delivered by {due}.",
    "{name} is waiting for {qty} {item}, and we promised them by {due}.",
    "Make sure {name} gets {qty} {item} by {due}, as we agreed on {date2}.",
    "Rush order! {name} needs {qty} {item} by {due} at the latest.",
    "A request came in from {name} on {date2}: {qty} {item}, to be ready by {due}.",
    "{name} called to order {qty} {item}. Delivery should be on {due}. The total comes to {price}.",
    "Hey, can you ship {qty} {item} to {name} by {due}? Cheers!",
    "Name: {name}; item: {item}; qty: {digits}; due date: {due}; phone: {phone}",
    "Due {due}: {qty} {item}, ordered by {name} on {date2}.",
    "I'm {name}, and I'd like to place an order for {qty} {item}. Please have them here by {due}.",
    "{name} (phone {phone}) would like {qty} {item} by {due}.",
    "{name} (order no. {ref}) asked for {qty} {item} to be delivered on {due}.",
    "Our client {name} requires {qty} {item} before {due}. Invoice {ref} was paid on {date2}.",
    "Please deliver {qty} {item} to our customer {name} on {due}. Thanks in advance.",
    "{name} wants to have {qty} {item} ready for pickup on {due}.",
    "Thanks for your help on {date2}. I would now like to order {qty} {item}, due {due}. Regards, {name}",
    "As discussed on {date2}, {name} will take {qty} {item}, and the delivery date is {due}.",
    "For {due}, {name} has asked us to prepare {qty} {item}.",
    "{name} rang to say that they need {qty} {item} by {due}; no hurry with the invoice.",
    "Hello, we at {name} need {qty} {item}. Please deliver by {due}.",
    "There is a new order from {name}. They need {qty} {item}, and all of it has to be there by {due}.",
    "Kindly ship {qty} {item} to {name}. They have to arrive on or before {due}.",
    "{name} has paid {price} in advance for {qty} {item}, which are due {due}.",
    "Message received {date2}: {name} would like {qty} {item} in time for {due}.",
    "Order form. Client: {name}. Goods: {item}. Number of units: {num}. Deliver by: {due}. Reference: {ref}.",
    "I need to order {qty} {item} for a birthday party, so they must be here by {due}. Sincerely, {name}",
    "Would you please note an order of {qty} {item} for {name}, with delivery on {due}?",
    "{name}, a regular customer, wants {qty} {item} for {due}.",
    "Delivery for {name} on {due}: {qty} {item}. Price {price}.",
    "It is urgent: {name} must receive {qty} {item} by {due}.",
    "We agreed with {name} on {date2} that {qty} {item} will be delivered by {due}.",
    "{name} would like {item}, {num} of them, by {due}.",
    "{name} decided to take {item} ({digits} pieces), delivery no later than {due}.",
    "Put {qty} {item} aside for {name}; they are needed on {due}.",
    "Please add an order: {name}, {qty} {item}, by {due}. The previous one was dated {date2}.",
    "{name} is a new customer. They ordered {qty} {item} and want delivery by {due}.",
    "The order from {name} is for {qty} {item} and it is due on {due}.",
    "Can we get {qty} {item} to {name} by {due}? Their number is {phone}.",
    "Sold to {name} on {date2}: {qty} {item}. To be delivered by {due}.",
    "I'd like to order {qty} {item}. I need everything by {due}. You can reach me at {phone}. {name}",
    "{name} needs exactly {num} {item} by {due}.",
    "A total of {num} {item} must reach {name} by {due}.",
    "Since {date2} {name} has been waiting for {qty} {item}; the new due date is {due}.",
    "We are sending {qty} {item} to {name}, and they have to be there by {due}.",
    "Request: {qty} {item}. Customer: {name}. Deadline: {due}. Budget: {price}.",
    "If possible, {name} would like to receive {qty} {item} by {due}.",
    "{due} is the deadline for the {num} {item} that {name} ordered on {date2}.",
    "Quick note for the shop: {name}, {qty} {item}, due {due}.",
    "Ticket {ref}. {name} wrote: please deliver {qty} {item} by {due}.",
)
